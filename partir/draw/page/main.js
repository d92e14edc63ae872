"use strict";

// One page: what is chosen stands in the address, `#select=blocks.0.mlp.fc1.weight&view=backward`, so that a link shows it again.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const view = new GraphView(byId("graph"), (id) => (id ? choose({ id }) : clear()));
const panel = new Panel(byId("panel"), data);
const table = new Table(byId("collectives"), data, (id) => choose({ id, center: true }));
const search = new Search(byId("search"), byId("found"), data, (item) => choose({ ...item, center: true }));
let shown = null;

// Choose a node by its id, in a view that shows it; `name` and `layout`: by what it was found.
async function choose({ id, name, layout, center }) {
  if (!view.has(id)) await showView("both");
  view.mark(id, data.edges);
  table.mark(id);
  panel.show(id, name === undefined ? null : { name, layout });
  if (center) view.center(id);
  remember({ select: name ?? data.nodes[id].key });
}

function clear() {
  view.mark(null, []);
  table.mark(null);
  panel.rest();
  remember({ select: null });
}

async function showView(name) {
  if (shown === name) return;
  shown = name;
  for (const button of byId("views").children) button.className = button.dataset.view === name ? "chosen" : "";
  table.only(name === "both" ? ["forward", "backward"] : [name]);
  await view.show(data.views[name]);
  remember({ view: name === "both" ? null : name });
}

function remember(changes) {
  const facts = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of Object.entries(changes)) {
    if (value === null) facts.delete(name);
    else facts.set(name, value);
  }
  history.replaceState(null, "", `#${facts}`);
}

// Show what the address asks for: a node by its key, `forward linear_2`, or a tensor by its name.
async function follow() {
  const facts = new URLSearchParams(location.hash.slice(1));
  const asked = facts.get("view");
  await showView(asked in data.views ? asked : "both");
  const wanted = facts.get("select");
  if (wanted === null) return clear();
  const found = data.names.filter(([name]) => name === wanted).find(([, id]) => view.has(id));
  const named = found ?? data.names.find(([name]) => name === wanted);
  const keyed = Object.keys(data.nodes).find((id) => data.nodes[id].key === wanted);
  if (keyed) await choose({ id: keyed, center: true });
  else if (named) await choose({ name: named[0], id: named[1], layout: named[2], center: true });
  else clear();
}

function legend() {
  const spot = (text, background, color) => element("span", { style: `background: ${background}; color: ${color}` }, text);
  const axes = data.mesh.axes.map((axis) => spot(`along ${axis}`, data.colours[axis], "#fff"));
  const states = Object.entries(data.tints).map(([state, tint]) => spot(`result in state ${state}`, tint, "#000"));
  byId("legend").append(...axes, ...states);
}

function start() {
  document.title = `${data.title} - partir`;
  const total = `${data.bytes.toLocaleString("en-US")} bytes received by each rank in one step`;
  byId("title").append(data.title, " ", element("small", {}, total));
  legend();
  byId("fit").onclick = () => view.fit();
  byId("closer").onclick = () => view.zoom(0.7);
  byId("farther").onclick = () => view.zoom(1.4);
  for (const button of byId("views").children) button.onclick = () => showView(button.dataset.view).then(() => restore());
  window.addEventListener("hashchange", follow);
  window.addEventListener("keydown", (event) => {
    if (event.target.tagName === "INPUT") return;
    if (event.key === "f") view.fit();
    if (event.key === "Escape") clear();
    if (event.key === "/") {
      event.preventDefault();
      byId("search").select();
    }
  });
  follow().catch((error) => byId("graph").replaceChildren(element("p", { id: "wait", className: "failed" }, `could not draw: ${error}`)));
}

// Mark again what is chosen where the view has changed.
function restore() {
  if (table.marked) view.mark(table.marked, data.edges);
}

start();
