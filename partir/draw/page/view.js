"use strict";

// The drawing: rendered by Graphviz in this page, moved by wheel and drag, its nodes found by their ids.
class GraphView {
  constructor(place, onSelect) {
    this.place = place;
    this.onSelect = onSelect;
    this.drawn = new Map(); // graphviz text -> svg text: going back to a view takes no layout
    this.listen();
  }

  // Draw graphviz text.
  async show(source) {
    if (!this.drawn.has(source)) {
      const graphviz = await loadGraphviz();
      this.drawn.set(source, graphviz.dot(source));
    }
    const parsed = new DOMParser().parseFromString(this.drawn.get(source), "image/svg+xml");
    this.svg = document.importNode(parsed.documentElement, true);
    this.svg.removeAttribute("width");
    this.svg.removeAttribute("height");
    this.place.replaceChildren(this.svg);
    const { x, y, width, height } = this.svg.viewBox.baseVal;
    this.whole = { x, y, width, height };
    this.fit();
  }

  fit() {
    this.look({ ...this.whole });
  }

  // Show a part of the drawing, in its own units.
  look(box) {
    this.box = box;
    this.svg?.setAttribute("viewBox", [box.x, box.y, box.width, box.height].join(" "));
  }

  // Zoom by a factor about a point of the window, or about the middle.
  zoom(factor, clientX, clientY) {
    if (!this.svg) return;
    const frame = this.place.getBoundingClientRect();
    const about = this.toDrawing(clientX ?? frame.x + frame.width / 2, clientY ?? frame.y + frame.height / 2);
    const { x, y, width, height } = this.box;
    this.look({
      x: about.x - (about.x - x) * factor,
      y: about.y - (about.y - y) * factor,
      width: width * factor,
      height: height * factor,
    });
  }

  toDrawing(clientX, clientY) {
    return new DOMPoint(clientX, clientY).matrixTransform(this.svg.getScreenCTM().inverse());
  }

  has(id) {
    return Boolean(this.svg && document.getElementById(id));
  }

  // Mark a node and the edges at it; null marks nothing.
  mark(id, edges) {
    this.svg?.querySelectorAll(".selected, .near").forEach((item) => item.classList.remove("selected", "near"));
    this.svg?.querySelectorAll(".framed").forEach((item) => item.remove());
    const node = id && this.svg && document.getElementById(id);
    if (!node) return;
    node.classList.add("selected");
    if (!node.querySelector("ellipse, polygon")) node.querySelector("text").before(frame(node));
    for (const [edge, source, target] of edges) {
      if (source === id || target === id) document.getElementById(edge)?.classList.add("near");
    }
  }

  // Bring a node to the middle, near enough to read it.
  center(id) {
    const node = document.getElementById(id);
    const place = node.getBoundingClientRect();
    const middle = this.toDrawing(place.x + place.width / 2, place.y + place.height / 2);
    const width = Math.min(this.box.width, 900, this.whole.width);
    const height = (width * this.place.clientHeight) / this.place.clientWidth;
    this.look({ x: middle.x - width / 2, y: middle.y - height / 2, width, height });
  }

  listen() {
    let start = null;
    this.place.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY * 0.0015), event.clientX, event.clientY);
    }, { passive: false });
    this.place.addEventListener("pointerdown", (event) => {
      if (this.svg) start = { x: event.clientX, y: event.clientY, box: this.box, moved: false };
    });
    window.addEventListener("pointermove", (event) => {
      if (!start) return;
      const [dx, dy] = [event.clientX - start.x, event.clientY - start.y];
      start.moved ||= Math.abs(dx) + Math.abs(dy) > 4;
      this.place.classList.toggle("dragged", start.moved);
      if (start.moved) this.look({ ...start.box, x: start.box.x - dx * this.pixel(start.box), y: start.box.y - dy * this.pixel(start.box) });
    });
    window.addEventListener("pointerup", (event) => {
      const clicked = start && !start.moved;
      start = null;
      this.place.classList.remove("dragged");
      if (!clicked) return;
      const node = event.target.closest?.("g.node");
      this.onSelect(node && this.place.contains(node) ? node.id : null);
    });
  }

  // Units of the drawing in one pixel of the window, where a box is shown whole.
  pixel(box) {
    return Math.max(box.width / this.place.clientWidth, box.height / this.place.clientHeight);
  }
}

// A frame about a node that is only text.
function frame(node) {
  const { x, y, width, height } = node.getBBox();
  const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  const sides = { x: x - 3, y: y - 2, width: width + 6, height: height + 4, class: "framed" };
  for (const [name, value] of Object.entries(sides)) rect.setAttribute(name, value);
  return rect;
}

let loading = null;

// Graphviz, as the module that stands in this page.
function loadGraphviz() {
  loading ??= (async () => {
    const text = document.getElementById("graphviz").textContent;
    const address = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
    const module = await import(address);
    URL.revokeObjectURL(address);
    return module.Graphviz.load();
  })();
  return loading;
}
