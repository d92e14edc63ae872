"""What rules say about real calls: factors of each dim, what stays whole, local attributes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from partir import rules
from partir.rules import Binding, MatrixProduct
from partir.rules.regroup import regroup

aten = torch.ops.aten
ids = torch.zeros(2, 3, dtype=torch.long)


def bind(op: Any, *args: Any, **kwargs: Any) -> Binding:
    rule = rules.find(op)
    assert rule is not None
    return rule.bind(args, kwargs, op(*args, **kwargs))


def show(dims: tuple[tuple[str, ...], ...]) -> str:
    """``*1 (c*d) 1``."""
    return " ".join("1" if not dim else dim[0] if len(dim) == 1 else "(" + "*".join(dim) + ")" for dim in dims)


def text(binding: Binding) -> str:
    sides = [", ".join(show(dims) for dims in tensors) for tensors in (binding.operands, binding.results)]
    return f"{sides[0]} -> {sides[1]}"


r = torch.rand
FACTORS = [
    ((aten.linear.default, r(2, 3, 8), r(5, 8), r(5)), "*1 *0 k, n k, n -> *1 *0 n"),
    ((aten.linear.default, r(2, 3, 8), r(5, 8)), "*1 *0 k, n k -> *1 *0 n"),
    ((aten.add.Tensor, r(3, 1), r(2, 1, 4)), "*1 1, *2 1 *0 -> *2 *1 *0"),
    ((aten.add.Tensor, r(3, 1), 2.0), "*1 1 -> *1 1"),
    ((aten.gelu.default, r(3, 4)), "*1 *0 -> *1 *0"),
    ((aten.sum.dim_IntList, r(2, 3, 4), [0, -1], True), "d0 .0 d1 -> 1 .0 1"),
    ((aten.sum.dim_IntList, r(2, 3, 4), [0]), "d .1 .0 -> .1 .0"),
    ((aten.mean.dim, r(2, 3), None), "d0 d1 -> "),
    ((aten.transpose.int, r(2, 3, 4), 1, -1), ".0 a b -> .0 b a"),
    ((aten.permute.default, r(2, 3, 4), [2, 0, -2]), ".2 .1 .0 -> .0 .2 .1"),
    ((aten.movedim.intlist, r(2, 3, 4), [0, 1], [1, 2]), "a0 a1 .0 -> .0 a0 a1"),
    ((aten.chunk.default, r(2, 9), 3, -1), ".0 (c*d) -> .0 d, .0 d, .0 d"),
    ((aten.split_with_sizes.default, r(2, 48), [32, 8, 8], 1), ".0 (c*d) -> .0 (c'0*d), .0 d, .0 d"),
    ((aten.split.Tensor, r(2, 40), 16, 1), ".0 (c*d) -> .0 (c'0*d), .0 (c'1*d), .0 d"),
    ((aten.cat.default, [r(2, 4), r(2, 4)], -1), ".0 d, .0 d -> .0 (c*d)"),
    ((aten.stack.default, [r(2, 4), r(2, 4)], -1), ".1 .0, .1 .0 -> .1 .0 n"),
    ((aten.unbind.int, r(2, 4)), "d .0 -> .0, .0"),
    ((aten.select.int, r(3, 4), 0, 1), "d .0 -> .0"),
    ((aten.slice.Tensor, r(2, 6), 1, 0, 9223372036854775807), ".1 .0 -> .1 .0"),
    ((aten.slice.Tensor, r(2, 6), 1, 1, 4), ".1 .0 -> .1 .0=3"),
    ((aten.constant_pad_nd.default, r(2, 6), [0, 1]), ".1 .0 -> .1 .0=7"),
    ((aten.expand.default, r(3, 1), [2, -1, 4]), "*1 1 -> *2 *1 *0"),
    ((aten.repeat.default, r(3, 4), [2, 1, 3]), "*1 *0 -> r2 *1 (r0**0)"),
    ((aten.repeat_interleave.self_int, r(2, 3, 4), 2, 1), ".1 d .0 -> .1 (d*r) .0"),
    ((aten.embedding.default, r(10, 8), ids), "v h, *1 *0 -> *1 *0 h"),
    ((aten.index.Tensor, r(5, 6), [ids]), "v .0, *1 *0 -> *1 *0 .0"),
    ((aten.gather.default, r(3, 9), 1, torch.zeros(3, 2).long()), ".0 c, .0 e -> .0 e"),
    ((aten.native_layer_norm.default, r(2, 3), [3], None, None, 1e-5), "*0 h -> *0 h, *0 1, *0 1"),
    ((aten.full.default, [2, 3], 1.0), " -> .1 .0"),
    ((aten.view.default, r(2, 3, 768), [6, 12, 64]), "v0 v1 (v2*v3) -> (v0*v1) v2 v3"),
    ((aten.view.default, r(6, 4), [4, 6]), "v0.0 v0.1 -> v0'.0 v0'.1"),
    ((aten.squeeze.dim, r(2, 1, 3), 1), "v0 1 v1 -> v0 v1"),
    (
        (aten.scaled_dot_product_attention.default, r(2, 4, 3, 5), r(2, 2, 6, 5), r(2, 2, 6, 7), r(3, 6), 0.0, False),
        "*0 (h*g) l d, *0 h s d, *0 h s e, l s -> *0 (h*g) l e",
    ),
]


@pytest.mark.parametrize(("call", "expected"), FACTORS, ids=[str(call[0]) for call, _ in FACTORS])
def test_factors(call: tuple[Any, ...], expected: str) -> None:
    op, *args = call
    kwargs = {"enable_gqa": True} if op is aten.scaled_dot_product_attention.default else {}
    assert text(bind(op, *args, **kwargs)) == expected


def test_linear() -> None:
    binding = bind(aten.linear.default, r(2, 3, 8), r(5, 8), r(5))
    assert binding.sizes == {"*1": 2, "*0": 3, "k": 8, "n": 5}
    assert binding.sums == {"k"} and not binding.whole and binding.free == {"*0", "*1", "n"}
    assert binding.positions == (("input", None), ("weight", None), ("bias", None))
    assert binding.once == ((2, frozenset({"k"})),)
    assert binding.product == MatrixProduct(("*1", "*0"), ("k",), ("n",), 0, 1)
    assert binding.num_flops() == 2 * 8 * 2 * 3 * 5
    assert str(binding.flops()) == "2**0**1*k*n"
    assert binding.num_flops({"k": 4}) == 2 * 4 * 2 * 3 * 5


def test_products_of_other_ops() -> None:
    assert bind(aten.addmm.default, r(5), r(2, 4), r(4, 5)).product == MatrixProduct(("m",), ("k",), ("n",), 1, 2)
    lookup = bind(aten.embedding.default, r(10, 8), ids)
    assert lookup.product == MatrixProduct(("*1", "*0"), ("v",), ("h",), 1, 0)
    assert lookup.index == ((1, 0, "v"),) and lookup.sums == {"v"}
    assert lookup.attributes["padding_idx"] == -1
    assert bind(aten.matmul.default, r(2, 3, 4), r(4, 5)).product is not None
    assert bind(aten.matmul.default, r(2, 3, 4), r(2, 4, 5)).product is None


def test_attention_keeps_sequences_and_says_when_it_draws() -> None:
    q, k = r(2, 4, 3, 5), r(2, 4, 3, 5)
    plain = bind(aten.scaled_dot_product_attention.default, q, k, k)
    assert plain.whole == {"s", "d"} and not plain.random
    causal = bind(aten.scaled_dot_product_attention.default, q, k, k, None, 0.0, True)
    assert causal.whole == {"l", "s", "d"}
    assert bind(aten.scaled_dot_product_attention.default, q, k, k, None, 0.1, True).random
    assert plain.free == {"*0", "h", "l", "e"}


def test_dropout_draws_in_training_only() -> None:
    assert bind(aten.dropout.default, r(3), 0.1, True).random
    assert not bind(aten.dropout.default, r(3), 0.1, False).random
    assert not bind(aten.dropout.default, r(3), 0.0, True).random


def test_recipes() -> None:
    binding = bind(aten.layer_norm.default, r(2, 8), [8], r(8))
    assert str(binding.splits["h"]) == (
        "mu = sum[h](x) / size[h]\nc = x - mu\ny = c * rsqrt(sum[h](c * c) / size[h] + eps) * w + b"
    )
    two = bind(aten.mean.dim, r(2, 3, 4), [0, 2])
    assert str(two.splits["d1"]) == "y = sum[d0, d1](to(x, dtype)) / size[d0, d1]"


def test_local_attributes() -> None:
    assert bind(aten.view.default, r(2, 3, 768), [6, 12, 64]).localise({"v2": 3}) == {"size": [6, 3, 64]}
    assert bind(aten.reshape.default, r(2, 3, 8), [6, -1]).localise({"v0": 1}) == {"shape": [3, 8]}
    assert bind(aten.split.Tensor, r(2, 48), 16, 1).localise({"d": 4}) == {"split_size": 4}
    assert bind(aten.split_with_sizes.default, r(48), [32, 8, 8]).localise({"d": 2}) == {"split_sizes": [8, 2, 2]}
    assert bind(aten.expand.default, r(3, 1), [2, -1, 4]).localise({"*0": 2}) == {"size": [2, 3, 2]}
    assert bind(aten.full.default, [2, 4], 1.0).localise({".0": 2}) == {"size": [2, 2]}
    assert bind(aten.unflatten.int, r(2, 12), -1, [3, -1]).localise({"v1": 1}) == {"sizes": [1, 4]}
    assert bind(aten.relu.default, r(2)).localise({}) == {}


def test_pending_sums_pass() -> None:
    assert bind(aten.add.Tensor, r(2), r(2)).linear_groups == (frozenset({0, 1}),)
    assert bind(aten.add.Tensor, r(2), 1.0).linear_groups == ()
    assert bind(aten.mul.Tensor, r(2), r(2)).linear_groups == (frozenset({0}), frozenset({1}))
    assert bind(aten.mul.Tensor, r(2), 3.0).linear == {0}
    assert bind(aten.gelu.default, r(2)).linear == frozenset()
    assert bind(aten.div.Tensor, r(2), r(2)).linear_groups == (frozenset({0}),)


def test_unequal_views_are_whole() -> None:
    binding = bind(aten.view.default, r(2, 6, 4), [2, 4, 6])
    assert binding.free == {"v0"} and len(binding.whole) == 4


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([2, 3, 768], [2, 3, 12, 64], {"v0": 2, "v1": 3, "v2": 12, "v3": 64}),
        ([2, 6], [4, 3], {"v0": 2, "v1": 2, "v2": 3}),
        ([5, 1, 7], [1, 35], {"v0": 5, "v1": 7}),
        ([], [1, 1], {}),
        ([4], [2, 2], {"v0": 2, "v1": 2}),
    ],
)
def test_regroup(before: list[int], after: list[int], expected: dict[str, int]) -> None:
    found = regroup(before, after)
    assert found.sizes == expected and not found.whole


def test_default_arguments_come_from_the_schema() -> None:
    binding = bind(aten.softmax.int, r(2, 3), -1)
    assert binding.attributes == {"dim": -1, "dtype": None}
    assert bind(aten.layer_norm.default, r(2, 8), [8]).attributes["eps"] == 1e-5
