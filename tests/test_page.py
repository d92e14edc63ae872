"""The page of a plan holds all that it needs, says what the plan says, and works in a real browser."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import pytest
import torch

from partir.blocks import shard
from partir.draw import picture_of, webpage
from partir.draw.ranks import layout_record, runs
from partir.draw.webpage import page, page_data
from partir.layout import Layout
from partir.mesh import Mesh
from tests.planned import meta_plan

FOLDER = Path(webpage.__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BUDGET = 60_000  # milliseconds of the page's own clock


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text of its scripts by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.found[-1] if self.found else ("", {})
        if tag == "script":
            name = attributes.get("id") or "program"
            self.scripts[name] = self.scripts.get(name, "") + data


@cache
def text() -> str:
    plan = meta_plan()
    return page(plan, picture_of(plan))


@cache
def data() -> dict[str, Any]:
    return dict(json.loads(Elements(text()).scripts["data"]))


def test_nothing_is_loaded_from_outside() -> None:
    elements = Elements(text())
    assert [tag for tag, _ in elements.found].count("script") == 3
    for tag, attributes in elements.found:
        assert not {"src", "href", "action", "data"} & set(attributes), tag
    assert "@import" not in text() and not re.search(r"url\(", (FOLDER / "page/page.css").read_text())
    policy = next(attributes["content"] for _, attributes in elements.found if attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none';") and "http" not in policy


def test_data_is_that_of_the_plan_and_all_of_it_is_found() -> None:
    plan = meta_plan()
    assert data() == json.loads(json.dumps(page_data(plan, picture_of(plan))))
    moves = [node["moves"] for node in data()["nodes"].values() if "moves" in node]
    assert sum(each["bytes"] for each in moves) == plan.bytes() == data()["bytes"]
    names = {name for name, _, _ in data()["names"]}
    assert names >= {slot.name for slot in plan.program.inputs if slot.kind == "parameter"} | {c.node for c in plan.collectives}
    layouts = data()["layouts"]
    known = {name: layouts[number]["text"] for name, _, number in data()["names"] if name in plan.layouts and number >= 0}
    assert len(known) > 60 and all(text == str(plan.layouts[name]) for name, text in known.items())


def test_every_node_and_edge_of_a_view_is_known_by_its_id() -> None:
    views, nodes, edges = data()["views"], data()["nodes"], {edge for edge, _, _ in data()["edges"]}
    for view, stages in webpage.VIEWS.items():
        drawn = re.findall(r"\bid=(n\d+)\b", views[view])
        assert sorted(drawn) == sorted(identity for identity, node in nodes.items() if node["stage"] in stages)
        assert set(re.findall(r'\bid="(e[^"]+)"', views[view])) <= edges
    assert {end for _, *ends in data()["edges"] for end in ends} <= set(nodes)


@pytest.mark.parametrize("name", ["</script><script>alert(1)</script>", "<!-- <script>", "a & b", "'\"\\", "\u2028"])
def test_no_name_ends_the_data(name: str) -> None:
    written = webpage._json({"name": name})  # pyright: ignore[reportPrivateUsage]
    assert not set("<>&") & set(written) and written.isascii()
    assert json.loads(written) == {"name": name}


LAYOUTS = [
    "f32[16@x.y, 24@z]",
    "f32[(3*8@y)@x, 6@z]",
    "f32[(4@x*6@z), 5]",
    "f32[(4@y*6@x)@z]",
    "f32[16@x, 8] +z ~y",
    "f32[24@z.x.y]",
    "f32[]",
]


@pytest.mark.parametrize("notation", LAYOUTS)
@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 4, 1), (2, 1, 3), (2, 2, 2, 2)])
def test_the_slices_that_the_cube_shows_are_the_blocks_that_ranks_hold(notation: str, sizes: tuple[int, ...]) -> None:
    layout, mesh = Layout.parse(notation), Mesh.parse(sizes)
    for number, dim in enumerate(layout.strip(mesh).dims):
        alone = Layout("i64", (dim,))
        spelled = cast(Any, layout_record(layout, mesh))["dims"][number]["slices"]
        for rank in range(mesh.size):
            held = shard(torch.arange(dim.size), alone, mesh, rank).tolist()
            found, count = runs(dim, mesh, mesh.coordinate(rank), dim.size)
            assert [index for start, stop in found for index in range(start, stop)] == held and len(found) == count
            first = ", ".join(f"{start}:{stop}" for start, stop in found[:3])
            assert spelled[mesh.index(rank, dim.all_axes)] == first + (f" ... {count} runs" if count > 3 else "")


def test_graphviz_is_the_version_that_its_page_names_and_wheels_hold_every_file() -> None:
    told = (FOLDER / "vendor/THIRD_PARTY.md").read_text()
    assert hashlib.sha256((FOLDER / "vendor/graphviz.js").read_bytes()).hexdigest() in told
    assert "Apache License" in (FOLDER / "vendor/LICENSE").read_text()
    configuration = (FOLDER.parent.parent / "pyproject.toml").read_text()
    assert '"partir.draw" = ["page/*", "vendor/*"]' in configuration
    assert all(path.parent.name in ("page", "vendor") for path in FOLDER.rglob("*.*") if path.suffix not in (".py", ".pyc"))


Opened = Callable[[str, str], str]


@pytest.fixture
def browser(tmp_path: Path) -> Opened:
    """Return a call that opens the page in a headless Chromium and returns what it has become.

    Its arguments: the part of the address after ``#``, and a program that a user's hand stands for, which runs after the first drawing.
    """
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed (apt install chromium)")

    def open_page(fragment: str, hand: str = "") -> str:
        path = tmp_path / "page.html"
        path.write_text(text().replace("</body>", f"<script>{WAIT}{hand}</script></body>"))
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
        clock = [f"--virtual-time-budget={BUDGET}", "--window-size=1600,1000", "--dump-dom"]
        address = f"file://{path}#{fragment}"
        run = subprocess.run([program, *options, *clock, address], capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        return run.stdout

    return open_page


# The page's clock leaps where the page has nothing to do, as while Graphviz compiles on another thread: the loop spins until it has drawn.
WAIT = """
const spin = () => { for (let turn = 0; turn < 3e7; turn++) Math.sqrt(turn); };
const drawn = () => new Promise((done) => {
  const look = () => {
    if (document.querySelector("#graph svg")) return done();
    spin();
    setTimeout(look, 20);
  };
  look();
});
const report = (facts) => document.body.append(element("pre", { id: "report" }, JSON.stringify(facts)));
"""


def graph_of(dom: str) -> set[str]:
    """Return the ids of the nodes that are drawn."""
    return set(re.findall(r'<g id="(n\d+)" class="node', dom))


@pytest.mark.browser
def test_an_address_opens_a_view_with_a_tensor_chosen(browser: Opened) -> None:
    dom = browser("select=" + quote("blocks.1.mlp.fc1.weight") + "&view=forward", "drawn();")
    nodes = data()["nodes"]
    assert graph_of(dom) == {identity for identity, node in nodes.items() if node["stage"] == "forward"}
    (chosen,) = re.findall(r'<g id="(n\d+)" class="node selected"', dom)
    assert nodes[chosen]["key"] == "forward blocks.0.mlp.fc1.weight"
    panel = dom[dom.index('<aside id="panel"') : dom.index("</aside>")]
    assert "<h2>blocks.1.mlp.fc1.weight</h2>" in panel and "f64[192@y.x, 48@z]" in panel
    assert panel.count('class="rank') == 8 and "dim 0  192@y.x:  0:48" in panel
    moving = [node for node in nodes.values() if "moves" in node and node["stage"] == "forward"]
    assert len(re.findall(r"<tr [^>]*data-id", dom)) == len(moving)


HAND = """
drawn().then(async () => {
  const facts = {};
  const rows = () => [...document.querySelectorAll("#collectives tbody tr")];
  const cells = (column) => rows().map((row) => row.children[column].textContent);
  const marked = () => document.querySelector("#graph .selected")?.id;
  const box = () => document.querySelector("#graph svg").getAttribute("viewBox");
  facts.places = cells(0).slice(0, 3);
  document.querySelectorAll("#collectives th")[2].click();
  facts.axes = cells(2);
  document.querySelectorAll("#collectives th")[2].click();
  facts.turned = cells(2);
  rows()[0].click();
  await new Promise((done) => setTimeout(done, 50));
  facts.row = [rows()[0].dataset.id, marked(), document.querySelector("#collectives .selected").dataset.id];
  const near = box();
  document.getElementById("fit").click();
  const far = box();
  const graph = document.getElementById("graph");
  graph.dispatchEvent(new WheelEvent("wheel", { deltaY: -200, clientX: 300, clientY: 300, bubbles: true, cancelable: true }));
  facts.boxes = [near, far, box()];
  const drag = (type, target, x, y) => target.dispatchEvent(new PointerEvent(type, { clientX: x, clientY: y, bubbles: true }));
  drag("pointerdown", graph, 300, 300);
  drag("pointermove", window, 340, 300);
  drag("pointerup", graph, 340, 300);
  facts.dragged = [box(), marked()];
  const search = document.getElementById("search");
  search.value = "fc2.weight";
  search.dispatchEvent(new InputEvent("input"));
  facts.found = [...document.querySelectorAll("#found li")].map((line) => line.firstChild.textContent);
  search.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
  await new Promise((done) => setTimeout(done, 50));
  facts.searched = [marked(), document.querySelector("#panel h2").textContent, decodeURIComponent(location.hash)];
  const ranks = [...document.querySelectorAll("#panel .rank")];
  drag("pointermove", ranks.find((rank) => rank.dataset.rank === "7").firstChild, 0, 0);
  facts.rank = document.querySelector("#panel .held").textContent;
  const node = document.querySelector("#graph .node.selected") ?? document.querySelector("#graph .node");
  const other = [...document.querySelectorAll("#graph .node")].find((each) => each !== node);
  drag("pointerdown", other, 10, 10);
  drag("pointerup", other, 10, 10);
  await new Promise((done) => setTimeout(done, 50));
  facts.clicked = [other.id, marked()];
  document.querySelector("[data-view=backward]").click();
  await new Promise((done) => setTimeout(done, 3000));
  facts.stages = [...new Set(cells(6))];
  facts.hash = location.hash;
  report(facts);
});
"""


@pytest.mark.browser
def test_a_hand_sorts_selects_zooms_searches_and_filters(browser: Opened) -> None:
    dom = browser("", HAND)
    (found,) = re.findall(r'<pre id="report">(.*?)</pre>', dom, re.DOTALL)
    facts = json.loads(found.replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    assert facts["places"] == ["1", "2", "3"]
    assert facts["axes"] == sorted(facts["axes"]) and facts["turned"] == sorted(facts["axes"], reverse=True)
    assert len(set(facts["row"])) == 1 and facts["row"][0] in data()["nodes"]
    near, far, wheeled = ([float(number) for number in box.split()] for box in facts["boxes"])
    assert near[2] < far[2] and wheeled[2] < far[2]
    assert float(facts["dragged"][0].split()[0]) < wheeled[0] and facts["dragged"][1] == facts["row"][0]
    assert set(facts["found"]) >= {"blocks.0.mlp.fc2.weight", "blocks.1.mlp.fc2.weight", "d_blocks.0.mlp.fc2.weight"}
    assert facts["searched"][1] == "blocks.0.mlp.fc2.weight" and "select=blocks.0.mlp.fc2.weight" in facts["searched"][2]
    assert data()["nodes"][facts["searched"][0]]["key"] == "forward blocks.0.mlp.fc2.weight"
    assert facts["rank"].startswith("rank 7  x=1 y=1 z=1\ndim 0  48@z.x:  36:48\ndim 1  192@y:  96:192")
    assert facts["clicked"][0] == facts["clicked"][1]
    assert facts["stages"] == ["backward"] and "view=backward" in facts["hash"]
    assert graph_of(dom) == {identity for identity, node in data()["nodes"].items() if node["stage"] == "backward"}
