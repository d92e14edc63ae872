"""The drawing of a plan: every collective with its axis's colour and its bytes, repeated layers once, files by their suffix."""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import partir
from examples import pictures
from partir.dims import Dim
from partir.draw import picture_of, style
from partir.draw.fold import fold
from partir.draw.picture import DrawnEdge, DrawnNode, Picture
from partir.draw.ranks import runs
from partir.draw.style import breadth, byte_text, colour, width
from partir.mesh import Mesh
from tests.planned import meta_plan, mlp_plan

FILES = (".svg", ".png", ".pdf")


@functools.cache
def small_plan() -> partir.Plan:
    return mlp_plan()


def source(plan: partir.Plan, fold: bool = False) -> str:
    return plan.dot(fold=fold).source


def attributes(text: str, key: str) -> str:
    (found,) = re.findall(rf'^\s*"{re.escape(key)}" \[(.*)\]$', text, re.MULTILINE)
    return str(found)


def test_every_collective_is_drawn_once_in_the_colour_of_its_axis_with_its_bytes() -> None:
    plan = meta_plan()
    text = source(plan)
    for record in plan.collectives:
        node = attributes(text, f"{record.stage} {record.node}")
        assert f'fillcolor="{colour(record.axis)}"' in node
        assert re.search(rf'label="(#\d  )?{record.op} {re.escape(record.axis)}( again)?\\n{re.escape(byte_text(record.bytes))}"', node)


def test_what_moves_more_is_wider() -> None:
    plan = small_plan()
    text, most = source(plan), max(record.bytes for record in plan.collectives)
    for record in plan.collectives:
        key = f"{record.stage} {record.node}"
        assert f"width={breadth(record.bytes, most)}" in attributes(text, key)
        for edge in re.findall(rf'^\s*".*" -> "{re.escape(key)}" \[(.*)\]$', text, re.MULTILINE):
            assert f"penwidth={width(record.bytes, most)}" in edge and colour(record.axis) in edge
    for measure in (width, breadth):
        sizes = [measure(number, 1000) for number in (0, 1, 10, 100, 900, 1000)]
        assert sizes == sorted(set(sizes))


def test_the_costliest_are_numbered_in_the_order_of_their_bytes() -> None:
    plan = meta_plan()
    drawn = picture_of(plan)
    text = source(plan, fold=True)
    ordered = sorted(drawn.collectives(), key=lambda node: -node.bytes)
    for place, node in enumerate(ordered, 1):
        marked = re.search(r'label="#(\d+) ', attributes(text, node.key))
        assert (marked and int(marked[1])) == (place if place <= style.COSTLIEST else None)
        if place <= style.COSTLIEST:
            assert f"<B>#{place}</B>  {byte_text(node.bytes)}" in text


def test_clusters_are_modules_and_the_backward_is_dashed() -> None:
    text = source(meta_plan())
    for stage in ("forward", "backward"):
        for name in ("blocks.0", "blocks.1", "token_embedding"):
            assert f'subgraph "cluster {stage} {name}" {{' in text
        assert f'subgraph "cluster {stage} blocks.0 blocks.0.attn" {{' in text
    assert "label=backward labelloc=t style=dashed" in text
    assert text.count("{") == text.count("}")


def test_parameters_values_and_gradients_are_drawn() -> None:
    text = source(small_plan())
    assert "label=weight" in attributes(text, "forward fc1.weight") and "plaintext" in attributes(text, "forward fc1.weight")
    assert r'label="linear\nf64[8@x.z, 64@y]"' in attributes(text, "forward linear")
    assert 'label="d weight"' in attributes(text, "backward d_fc1.weight")
    assert 'label="gelu (saved)"' in attributes(text, "backward saved gelu")


def test_what_a_rank_knows_of_its_own_place_joins_nothing() -> None:
    text = source(meta_plan())
    assert "coordinate" in meta_plan().text("forward")
    assert '"forward embedding" -> "forward embedding_1"' not in text and "coordinate" not in text


def test_results_in_state_y_and_in_state_z_are_told_apart() -> None:
    text = source(small_plan())
    assert f'fillcolor="{style.TINTS["z"]}"' in attributes(text, "forward linear")
    assert f'fillcolor="{style.TINTS["y"]}"' in attributes(text, "forward linear_1")
    assert "result in state y" in text and "result in state z" in text


@pytest.mark.parametrize("folded", [False, True])
def test_edges_join_nodes_that_are_drawn_and_two_drawings_are_identical(folded: bool) -> None:
    plan = meta_plan()
    text = source(plan, folded)
    drawn = set(re.findall(r'^\s*"([^"]+)" \[', text, re.MULTILINE))
    ends = re.findall(r'^\s*"([^"]+)" -> "([^"]+)"', text, re.MULTILINE)
    assert len(ends) > len(drawn) > 50
    assert {end for pair in ends for end in pair} <= drawn
    assert text == source(plan, folded) and text.isascii()


def test_a_mesh_of_one_rank_has_nothing_to_colour() -> None:
    text = source(mlp_plan((1, 1, 1)))
    assert not any(shade in text for shade in style.COLOURS.values()) and "0 bytes received" in text


def test_repeated_layers_are_drawn_once_and_stand_for_all_that_they_move() -> None:
    plan = meta_plan()
    whole, folded = picture_of(plan, fold=False), picture_of(plan)
    layers = ("blocks.0", "blocks.1")
    assert folded.folds == {("forward", "blocks.0"): layers, ("backward", "blocks.0"): layers}
    assert "blocks.0, blocks.1   x 2" in source(plan, fold=True)
    assert sum(node.bytes for node in folded.collectives()) == sum(node.bytes for node in whole.collectives()) == plan.bytes()
    assert {node.layer for node in folded.nodes.values()} == {"", "blocks.0"}
    names = {name for node in folded.nodes.values() for name in node.names}
    assert names == {name for node in whole.nodes.values() for name in node.names}
    assert names >= {slot.name for slot in plan.program.inputs if slot.kind == "parameter"} | {c.node for c in plan.collectives}


def chain(titles: list[str]) -> Picture:
    """One op a layer, each read by the next one's, the last read by the head."""
    made = Picture()
    nodes = [
        DrawnNode(f"forward op_{number}", "forward", f"blocks.{number}.mlp", "op", title, layers=(f"blocks.{number}",))
        for number, title in enumerate(titles)
    ]
    nodes.append(DrawnNode("forward head", "forward", "head", "op", "head"))
    for node in nodes:
        made.add(node)
    for first, second in zip(nodes, nodes[1:]):
        made.join(DrawnEdge(first.key, second.key))
    return made


def test_96_layers_become_one_with_an_edge_onward_and_one_out() -> None:
    folded = fold(chain(["linear"] * 96))
    assert list(folded.nodes) == ["forward op_0", "forward head"]
    assert folded.nodes["forward op_0"].count == 96
    assert [(edge.source, edge.target, edge.onward) for edge in folded.edges.values()] == [
        ("forward op_0", "forward op_0", True),
        ("forward op_0", "forward head", False),
    ]


def test_layers_that_alternate_are_two_and_one_that_differs_stands_alone() -> None:
    folded = fold(chain(["local", "whole", "local", "whole", "other"]))
    assert folded.folds == {("forward", "blocks.0"): ("blocks.0", "blocks.2"), ("forward", "blocks.1"): ("blocks.1", "blocks.3")}
    assert [node.count for node in folded.nodes.values()] == [2, 2, 1, 1]
    assert ("forward op_1", "forward op_0", False) in folded.edges and ("forward op_1", "forward op_4", False) in folded.edges


@pytest.mark.parametrize("changed", ["title", "layout", "edge"])
def test_a_layer_that_differs_in_anything_is_not_folded(changed: str) -> None:
    made = chain(["linear", "linear"])
    node = made.nodes["forward op_1"]
    if changed == "title":
        node.title = "gelu"
    elif changed == "layout":
        node.layout = partir.Layout.parse("f32[8@x]")
    else:
        made.add(DrawnNode("forward twin", "forward", "blocks.1.mlp", "op", "linear", layers=("blocks.1",)))
    assert fold(made).folds == {}


@pytest.mark.parametrize("suffix", FILES)
def test_picture_files(tmp_path: Path, suffix: str) -> None:
    if shutil.which("dot") is None:
        pytest.skip("the program dot is not installed: apt install graphviz")
    path = tmp_path / f"mlp{suffix}"
    small_plan().draw(path)
    assert path.read_bytes().startswith({".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}[suffix])
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", FILES)
def test_without_dot_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(partir.PartirError, match=r"needs the program dot: apt install graphviz / brew install graphviz") as raised:
        small_plan().draw(tmp_path / f"mlp{suffix}")
    assert "\n" not in str(raised.value) and list(tmp_path.iterdir()) == []
    small_plan().draw(tmp_path / "mlp.dot")
    assert (tmp_path / "mlp.dot").read_text() == small_plan().dot().source


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    plan = small_plan()
    (tmp_path / "folder.dot").mkdir()
    with pytest.raises(partir.PartirError, match=r"it has suffix '.jpg'; a drawing is one of .svg, .png, .pdf, .dot, .gv, .html"):
        plan.draw(tmp_path / "mlp.jpg")
    with pytest.raises(partir.PartirError, match="it has no suffix"):
        plan.draw(tmp_path / "mlp")
    with pytest.raises(partir.PartirError, match=r"there is no folder .*missing; make it first"):
        plan.draw(tmp_path / "missing" / "mlp.dot")
    with pytest.raises(partir.PartirError, match=r"folder.dot cannot be written: Is a directory"):
        plan.draw(tmp_path / "folder.dot")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.dot"]


def test_a_batch_of_no_rows_is_drawn(tmp_path: Path) -> None:
    plan = partir.plan(nn.Linear(8, 8), (1, 1, 1), torch.empty(0, 8))
    plan.draw(tmp_path / "none.html")
    assert runs(Dim.parse("0@x"), Mesh.parse((2, 1, 1)), {"x": 1}, 4) == ([(0, 0)], 1)
    assert "0:0" in (tmp_path / "none.html").read_text()


def test_the_script_of_the_documentation_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--out", f"{tmp_path}/new", "--models", "gpt", "--mesh", "1", "1", "1", "--suffixes", ".dot", ".html"]
    monkeypatch.setattr("sys.argv", ["pictures", *options])
    pictures.main()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["gpt.dot", "gpt.html"]
    assert "blocks.0 ... blocks.3   x 4" in (tmp_path / "new" / "gpt.dot").read_text()
