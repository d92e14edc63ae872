"use strict";

// An element with attributes and children; text is never parsed as HTML.
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// The side panel: the facts of a node, and a cube for each layout that it has.
class Panel {
  constructor(place, data) {
    this.place = place;
    this.data = data;
  }

  // Show a node; `chosen` is the name by which it was found, which may have a layout of its own.
  show(id, chosen) {
    const node = this.data.nodes[id];
    const rows = node.facts.map(([name, text]) => element("tr", {}, element("td", {}, name), element("td", {}, text)));
    this.place.replaceChildren(
      element("h2", {}, chosen && chosen.name !== node.title ? `${chosen.name}` : node.title),
      element("table", {}, element("tbody", {}, ...rows)),
      ...this.cubes(this.layoutsOf(node, chosen)),
    );
  }

  layoutsOf(node, chosen) {
    const found = [["before", node.before], [node.before >= 0 ? "after" : "layout", node.layout]];
    if (chosen && chosen.layout >= 0 && chosen.layout !== node.layout) found.unshift([chosen.name, chosen.layout]);
    return found.filter(([, number]) => number >= 0).map(([title, number]) => [title, this.data.layouts[number]]);
  }

  cubes(layouts) {
    if (!layouts.length) return [];
    const tabs = element("div", { className: "tabs buttons" });
    const cube = element("div");
    const choose = (title, layout) => {
      for (const button of tabs.children) button.className = button.textContent === title ? "chosen" : "";
      cube.replaceChildren(...this.cube(layout));
    };
    for (const [title, layout] of layouts) tabs.append(element("button", { onclick: () => choose(title, layout) }, title));
    choose(...layouts[layouts[0][0] === "before" ? layouts.length - 1 : 0]); // a collective opens at its result
    return [tabs, cube];
  }

  cube(layout) {
    const held = element("div", { className: "held" });
    const tell = (rank, alike) => { held.textContent = describe(layout, rank, alike); };
    const cube = new Cube(this.data.mesh, layout, tell);
    const note = element("div", { className: "note" }, "a colour is a block; hover or click a rank, drag to turn");
    return [element("div", {}, element("b", {}, layout.text)), note, cube.svg, held];
  }

  // What to read while nothing is chosen.
  rest() {
    const lines = [
      "Click a node, a row of the table, or search a name.",
      "Wheel zooms, drag moves, fit shows all.",
      "#1 to #5 are the costliest collectives, all layers of a kind together.",
    ];
    this.place.replaceChildren(element("h2", {}, "Nothing chosen"), ...lines.map((line) => element("p", { className: "note" }, line)));
  }
}

function describe(layout, { rank, place, block }, alike) {
  const where = Object.entries(place).map(([axis, index]) => `${axis}=${index}`).join(" ");
  if (!block) return `rank ${rank}  ${where}\nholds nothing: only ranks with ${layout.owner.join(" = ")} do`;
  const lines = layout.dims.map((dim, number) => `dim ${number}  ${dim.text}:  ${block.slices[number]}`);
  const pending = layout.pending.map(([axis, kind]) => `pending ${kind} along ${axis}`);
  const shared = alike > 1 ? `${alike} ranks hold this block` : "no other rank holds this block";
  return [`rank ${rank}  ${where}`, ...lines, ...pending, shared].join("\n");
}
