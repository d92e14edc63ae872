"""Where programs run: every rank in this process, in lockstep, or one rank of torch.distributed.

simulated      a program as one differentiable function of whole tensors, all ranks in this process
run_lockstep   one graph, node by node, on all ranks
record         what moved: bytes received by each rank, counted where the data moves
"""
