"""Trace: the graph is functional and flat, and computes what the module computes, gradients included."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.models.bert import BERT, BERTConfig
from examples.models.gpt import GPT, GPTConfig
from examples.models.llama import Llama, LlamaConfig
from partir.errors import TraceError
from partir.passes.structure import flatten
from partir.passes.torch_ops import is_op, writes_into
from partir.passes.trace import flatten_inputs, trace
from tests.traced import Calls, flat_outputs, ops, run, worst

IDS = torch.arange(32).view(2, 16) % 48


def gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=48, block_size=16, num_layers=2, num_heads=4, hidden=32, **options)).double()


def hugging_face(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 48, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **options)).double()


def same_loss_and_gradients(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tolerance: float) -> None:
    def loss_of(value: Any) -> torch.Tensor:
        return value if isinstance(value, torch.Tensor) else value.loss

    parameters = list(model.parameters())
    mine = loss_of(run(trace(model, args, kwargs), model, args, kwargs))
    theirs = loss_of(model(*args, **kwargs))
    assert abs(mine.item() - theirs.item()) <= tolerance * abs(theirs.item())
    assert worst(torch.autograd.grad(mine, parameters), torch.autograd.grad(theirs, parameters)) <= tolerance


def test_gpt() -> None:
    same_loss_and_gradients(gpt(), (IDS, IDS), {}, 1e-12)


def test_bert() -> None:
    torch.manual_seed(0)
    config = BERTConfig(vocab_size=48, block_size=16, num_layers=2, num_heads=4, hidden=32)
    mask = torch.ones(2, 16)
    mask[1, 12:] = 0
    labels = IDS.clone()
    labels[:, ::2] = -100
    same_loss_and_gradients(BERT(config).double(), (IDS,), {"attention_mask": mask, "labels": labels}, 1e-12)


def test_llama() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "block_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden": 32, "mlp_hidden": 64}
    same_loss_and_gradients(Llama(LlamaConfig(**sizes)).double(), (IDS, IDS), {}, 1e-12)


@pytest.mark.parametrize("training", [False, True])
def test_hugging_face_gpt2_as_people_call_it(training: bool) -> None:
    model = hugging_face(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0).train(training)
    kwargs = {"input_ids": IDS, "labels": IDS}
    same_loss_and_gradients(model, (), kwargs, 1e-5)
    mine, theirs = run(trace(model, (), kwargs), model, (), kwargs), model(**kwargs)
    assert type(mine) is type(theirs) and list(mine.keys()) == list(theirs.keys())
    assert torch.equal(mine.logits, theirs.logits)
    assert type(mine.past_key_values) is type(theirs.past_key_values)
    assert mine.past_key_values.get_seq_length() == 16


def test_high_level_ops_stay_and_dropout_is_one_op() -> None:
    found = ops(trace(gpt(dropout=0.1).train(), (IDS, IDS)))
    for name in ("linear", "layer_norm", "embedding", "scaled_dot_product_attention", "dropout", "cross_entropy_loss"):
        assert name in found


def test_tied_parameters_are_one_placeholder() -> None:
    traced = trace(gpt(), (IDS, IDS))
    names = [slot.name for slot in traced.slots if slot.kind == "parameter"]
    assert names == [name for name, _ in gpt().named_parameters()]
    tied = next(node for node in traced.graph_module.graph.nodes if "embedding" in node.name and len(node.users) == 2)
    assert {user.name.split("_")[0] for user in tied.users} == {"embedding", "linear"}


def test_one_tensor_given_twice_is_two_inputs() -> None:
    traced = trace(Calls(lambda ids, labels: (ids + labels.float(), labels - 1)), (IDS,), {"labels": IDS})
    inputs = [node for node in traced.graph_module.graph.nodes if node.op == "placeholder"]
    assert [slot.name for slot in traced.slots] == ["args[0]", "labels"]
    assert all(node.users for node in inputs)
    first, second = run(traced, Calls(None), (IDS,), {"labels": IDS + 1})
    assert torch.equal(first, 2.0 * IDS + 1) and torch.equal(second, IDS)


def test_meta_device_needs_no_weights() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=48, block_size=16, num_layers=1, num_heads=4, hidden=32))
    traced = trace(model, (IDS, IDS))
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    values = [node.meta["val"] for node in traced.graph_module.graph.nodes if "val" in node.meta]
    assert {value.device.type for value in values if isinstance(value, torch.Tensor)} == {"cpu"}


def test_module_is_unchanged_after_success_and_failure() -> None:
    model = gpt().train()
    hooks: list[str] = []
    model.register_forward_hook(lambda *_: hooks.append("root"))
    before = {name: id(value) for name, value in model.named_parameters(remove_duplicate=False)}
    flags, attributes = [m.training for m in model.modules()], [dict(vars(m)) for m in model.modules()]
    trace(model, (IDS, IDS))
    with pytest.raises(TraceError):
        trace(model, (torch.zeros(2, 99, dtype=torch.long),))
    assert {name: id(value) for name, value in model.named_parameters(remove_duplicate=False)} == before
    assert [m.training for m in model.modules()] == flags
    assert [dict(vars(m)) for m in model.modules()] == attributes
    assert not hooks
    assert type(model(IDS, IDS).grad_fn).__name__ != "NoneType"


def test_graph_module_is_a_module() -> None:
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    traced = trace(model, (torch.ones(2, 4),))
    assert ops(traced) == ["linear", "relu"]


def test_python_numbers_are_part_of_the_structure() -> None:
    x = torch.ones(2)
    assert flatten_inputs((x, 2), {})[1] == flatten_inputs((x + 1, 2), {})[1]
    assert flatten_inputs((x, 2), {})[1] != flatten_inputs((x, 3), {})[1]
    assert flatten_inputs((x, 1), {})[1] != flatten_inputs((x, True), {})[1]
    assert flatten_inputs((x, 1), {})[1] != flatten_inputs((x, 1.0), {})[1]
    assert str(flatten_inputs((x, "a"), {"b": None})[1]) == "tuple(tuple(*, str:'a'), dict['b'](None))"


def test_structure_rebuilds_objects_and_aliases() -> None:
    class Cache(dict[str, Any]):
        pass

    cache = Cache(keys=torch.ones(2))
    cache.length = 3  # pyright: ignore[reportAttributeAccessIssue]
    tensors, structure = flatten({"a": cache["keys"], "b": [cache, None]}, merge=True)
    assert len(tensors) == 1
    again = structure.rebuild([torch.zeros(2)])
    assert type(again["b"][0]) is Cache and again["b"][0].length == 3
    assert again["a"] is again["b"][0]["keys"]


def nested(x: torch.Tensor) -> Any:
    return {"a": (x + 1, None), "n": 7, "b": [x * 2, "text"]}


def test_nested_outputs_are_rebuilt() -> None:
    x = torch.ones(2)
    value = run(trace(Calls(nested), (x,)), Calls(nested), (x,))
    assert value["a"][1] is None and value["n"] == 7 and value["b"][1] == "text"
    assert torch.equal(value["a"][0], x + 1) and torch.equal(value["b"][0], x * 2)


def in_place(x: torch.Tensor) -> torch.Tensor:
    h = (x * 1).neg_()
    v = h.view(-1)
    v[2:6].mul_(3)
    h.t()[1:].add_(1)
    h[:, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype)
    h.narrow(1, 2, 2).sigmoid_()
    z = torch.zeros_like(x)
    z.copy_(h[0])
    z[1] = 0.5
    z += v.view(4, 4)
    return (z * h).masked_fill_(x > 1, 0.25)


def test_in_place_ops_become_functional() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    traced = trace(Calls(in_place), (x,))
    calls = [node.target for node in traced.graph_module.graph.nodes if node.op == "call_function"]
    assert not any(is_op(target) and writes_into(target) for target in calls)
    mine, theirs = run(traced, Calls(in_place), (x,)), in_place(x)
    assert torch.equal(mine, theirs)
    assert worst(torch.autograd.grad(mine.sin().sum(), [x]), torch.autograd.grad(theirs.sin().sum(), [x])) == 0.0


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return self.norm(x) + self.mean


def test_new_values_of_buffers_are_outputs() -> None:
    model, x = Counting(), torch.randn(6, 4)
    traced = trace(model, (x,))
    outputs = flat_outputs(traced, model, (x,), {})
    written = {name: outputs[index].detach().clone() for index, name in traced.mutated_buffers}
    assert all(not outputs[index].requires_grad for index, _ in traced.mutated_buffers)
    value = model(x)
    assert torch.allclose(outputs[0], value)
    buffers = dict(model.named_buffers())
    assert set(written) == set(buffers)
    for name, new in written.items():
        assert torch.allclose(new, buffers[name]), name


def under_no_grad(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = (x * w).exp()
        with torch.enable_grad():
            kept = w * 3
    return (x * scale + kept * w).sum()


def test_no_grad_regions_stay_without_gradient() -> None:
    args = tuple(torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    traced = trace(Calls(under_no_grad), args)
    assert ops(traced).count("detach") == 1
    mine = torch.autograd.grad(run(traced, Calls(under_no_grad), args), args)
    assert worst(mine, torch.autograd.grad(under_no_grad(*args), args)) == 0.0


def test_no_grad_without_gradient_to_lose_needs_no_detach() -> None:
    def rotary(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            angles = positions.float().cos()
        return x * angles

    assert "detach" not in ops(trace(Calls(rotary), (torch.ones(3, requires_grad=True), torch.arange(3))))


def test_constants_are_lifted_with_their_values() -> None:
    table = torch.tensor([1.0, 2.0])
    traced = trace(Calls(lambda x: x * table), (torch.ones(2),))
    constant = next(slot for slot in traced.slots if slot.kind == "constant")
    assert constant.value is not None and torch.equal(constant.value, table)


def test_stack_trace_ends_with_the_users_line() -> None:
    node = next(n for n in trace(gpt(), (IDS, IDS)).graph_module.graph.nodes if n.name == "linear")
    assert "gpt.py" in node.meta["stack_trace"].splitlines()[-2]
    assert list(node.meta["nn_module_stack"].values())[-1][0] == "blocks.0.attn.qkv"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * 2


def branches(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def takes_number(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def chooses(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def hooks(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda gradient: gradient * 0)
    return y


def straight_through(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    with torch.no_grad():
        y.clamp_(-1, 1)
    return y


@pytest.mark.parametrize(
    ("function", "law", "code"),
    [
        (branches, "control flow, Python numbers and shapes", "x if x.sum() > 0 else -x"),
        (takes_number, "control flow, Python numbers and shapes", "x * x.sum().item()"),
        (chooses, "control flow, Python numbers and shapes", "x[x > 0]"),
        (lambda x: Doubled.apply(x.clone()), "torch.autograd.Function `Doubled`: it writes into its input in place", "Doubled.apply("),
        (hooks, "register_hook on a tensor inside forward", "y.register_hook("),
        (lambda x: x.mul_(2), "forward writes into the input `args[0]` in place", ""),
        (straight_through, "writes under no_grad into a value that has a gradient", ""),
        (lambda x: None, "forward returns no tensor, but None", ""),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(function: Any, law: str, code: str) -> None:
    x = torch.ones(3, 3, requires_grad=function is straight_through)
    with pytest.raises(TraceError, match=re.escape(law)) as caught:
        trace(Calls(function), (x,))
    assert code in str(caught.value)
    if code:
        assert re.search(r"test_trace\.py:\d+: `", str(caught.value))
    assert Doubled.apply(torch.full((1,), 3.0)) == 6
    assert ops(trace(Calls(lambda y: y * 2), (x,))) == ["mul"]


def test_inputs_on_another_device_are_refused() -> None:
    model = nn.Linear(2, 2)
    fake = copy.copy(torch.ones(1, 2))
    with torch._subclasses.FakeTensorMode():  # pyright: ignore[reportPrivateUsage]
        elsewhere = torch.empty(1, 2, device="cuda")
    with pytest.raises(TraceError, match="input `input` is on cuda:0, but parameter `weight` is on cpu"):
        trace(model, (elsewhere,))
    assert ops(trace(model, (fake,))) == ["linear"]


def test_hidden_parameters_are_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(TraceError, match="requires grad is used by forward but is not a parameter"):
        trace(Calls(lambda x: x * weight), (torch.ones(2),))


def test_parameters_in_a_python_list_are_parameters() -> None:
    model = nn.Linear(2, 2, bias=False)
    reached = [model.weight]
    model.forward = lambda input: input @ reached[0]  # pyright: ignore[reportAttributeAccessIssue]
    traced = trace(model, (torch.ones(1, 2),))
    assert [slot.kind for slot in traced.slots] == ["parameter", "input"]
    assert all(node.users for node in traced.graph_module.graph.nodes if node.op == "placeholder")


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.state + x
        return self.state


def test_state_that_is_no_buffer_is_refused() -> None:
    model = Remembers()
    before = model.state
    with pytest.raises(TraceError, match="assigns the tensor attribute `state`, which is not a buffer"):
        trace(model, (torch.ones(2),))
    assert model.state is before


def test_checkpointed_modules_trace() -> None:
    from torch.utils.checkpoint import checkpoint

    inner = nn.Linear(3, 3).double()
    model = Calls(lambda x: checkpoint(lambda y: F.gelu(inner(y)), x, use_reentrant=False))
    model.inner = inner
    x = torch.randn(2, 3, dtype=torch.float64)
    mine = run(trace(model, (x,)), model, (x,)).sum()
    assert worst(torch.autograd.grad(mine, [inner.weight]), torch.autograd.grad(model(x).sum(), [inner.weight])) == 0.0
