"""Train a byte-level GPT on the source of Python's own standard library, over a mesh of ranks.

    python examples/train_gpt.py --mesh 2,2,2 --compare                              # all 8 ranks in this process
    torchrun --nproc-per-node 8 examples/train_gpt.py --mesh 2,2,2 --compare         # 8 processes
    python examples/train_gpt.py --hf-config config.json --clip 1 --accumulate 4     # a Hugging Face model, from its config

Several machines: docs/cluster.md. The only line that knows of the mesh is `partir.parallelize(model, mesh=...)`.
"""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist
from models.gpt import GPT, GPTConfig
from torch import nn
from training import Trainee, draw_batches, draw_losses, is_first_rank, read_corpus, report, train

import partir

BYTES = 256


def parse_mesh(text: str) -> tuple[int, ...] | str:
    """Parse `2,2,2`; partir itself says what is wrong with the sizes."""
    try:
        return text if text == "auto" else tuple(int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes such as 2,2,2") from None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=parse_mesh, default=(2, 2, 2), help="sizes x,y,z or data,x,y,z, or auto (default: 2,2,2)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--hf-config", type=Path, help="config.json of a Hugging Face causal language model, in place of the GPT")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=0.0, help="the largest norm of the gradients (default: no limit)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--memory", choices=["low", "fast"], default="low", help="keep shards, or what was gathered")
    parser.add_argument(
        "--dtype", choices=["float32", "float64", "bfloat16"], default="float32", help="bfloat16 computes in it, on float32 parameters"
    )
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="folder of --save-every and --resume")
    parser.add_argument("--save-every", type=int, default=0, help="steps between two checkpoints (default: none)")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint, on whatever mesh it was made")
    parser.add_argument("--compare", action="store_true", help="train the single-device twin beside it")
    parser.add_argument("--out", type=Path, help="folder for plan.txt, graph.dot, graph.svg and loss.png")
    arguments = parser.parse_args()
    if arguments.accumulate < 1 or arguments.batch % arguments.accumulate:
        parser.error(f"--accumulate {arguments.accumulate} does not divide --batch {arguments.batch} into equal micro-batches")
    if arguments.compare and (arguments.resume or arguments.dtype == "bfloat16"):
        parser.error("--compare is of a run from its first step, in float32 or float64: leave out --resume and bfloat16")
    return arguments


def start_distributed() -> torch.device:
    """Join the process group that torchrun describes, if there is one; return this process's device."""
    local_rank = os.environ.get("LOCAL_RANK")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(local_rank or 0))
        torch.cuda.set_device(device)
    if local_rank is not None:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def build_model(arguments: argparse.Namespace) -> nn.Module:
    """Return a GPT, or what a Hugging Face config describes, with random weights."""
    torch.manual_seed(0)
    if arguments.hf_config is not None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(arguments.hf_config)
        if config.vocab_size < BYTES:
            raise SystemExit(f"{arguments.hf_config}: vocab_size {config.vocab_size} is too small for {BYTES} bytes.")
        return AutoModelForCausalLM.from_config(config)
    sizes = {"num_layers": arguments.layers, "num_heads": arguments.heads, "hidden": arguments.hidden, "dropout": arguments.dropout}
    return GPT(GPTConfig(vocab_size=BYTES, block_size=arguments.seq, **sizes))


def write_plan(plan: partir.Plan, folder: Path) -> None:
    """Write the plan's text and the communication graph, as svg too where graphviz is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.txt").write_text(f"{plan}\n")
    graph = folder / "graph.dot"
    graph.write_text(f"{plan.dot()}\n")
    if shutil.which("dot"):
        subprocess.run(["dot", "-Tsvg", str(graph), "-o", str(graph.with_suffix(".svg"))], check=True)


def resume(trainee: Trainee, folder: Path) -> int:
    """Load the latest checkpoint and return the number of steps that it has behind it."""
    found = partir.latest_checkpoint(folder)
    if found is None:
        raise SystemExit(f"--resume: no complete checkpoint is in {folder}.")
    return partir.load_checkpoint(trainee.model, trainee.optimizer, found).step


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    mesh = arguments.mesh
    corpus = read_corpus()
    compute_dtype = torch.bfloat16 if arguments.dtype == "bfloat16" else None
    options = {"memory": arguments.memory, "compute_dtype": compute_dtype, "reduce_dtype": None if compute_dtype is None else torch.float32}

    model = build_model(arguments).to(device, torch.float64 if arguments.dtype == "float64" else torch.float32)
    twin = copy.deepcopy(model) if arguments.compare and is_first_rank() else None
    if is_first_rank():
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{size:,} parameters, {len(corpus):,} bytes of source, mesh {mesh}, {device}")
    if arguments.out is not None and is_first_rank():
        ids = torch.zeros(arguments.batch // arguments.accumulate, arguments.seq, dtype=torch.long, device=device)
        write_plan(partir.plan(model, mesh, (ids,), {"labels": ids.clone()}, **options), arguments.out)

    model = partir.parallelize(model, mesh=mesh, **options)
    how = {"lr": arguments.lr, "clip": arguments.clip, "accumulate": arguments.accumulate}
    trainees = [Trainee(f"mesh {mesh}", model, **how)]
    if twin is not None:
        trainees.append(Trainee("one device", twin, **how, eager=True))

    first = resume(trainees[0], arguments.checkpoints) if arguments.resume else 0
    batches = draw_batches(corpus, first, arguments.steps, arguments.batch, arguments.seq)
    start = time.perf_counter()
    for step in train(trainees, batches, first, arguments.steps, device):
        if arguments.save_every and step % arguments.save_every == 0:
            partir.save_checkpoint(model, trainees[0].optimizer, arguments.checkpoints / f"step_{step}", step=step)
    if not is_first_rank():
        return
    report(trainees, time.perf_counter() - start)
    if arguments.out is not None:
        draw_losses(trainees, arguments.out / "loss.png")
        print("written: " + ", ".join(str(path) for path in sorted(arguments.out.iterdir())))


def main() -> None:
    arguments = parse_arguments()
    device = start_distributed()
    try:
        run(arguments, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
