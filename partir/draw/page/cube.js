"use strict";

const SVG = "http://www.w3.org/2000/svg";
const SIDE = 0.55; // of a rank's box, where the next one is 1 away
const FACES = [ // the corners of each face, and the direction in which it looks
  { corners: [[0, 0, 0], [0, 1, 0], [0, 1, 1], [0, 0, 1]], normal: [-1, 0, 0], light: 0.78 },
  { corners: [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 1]], normal: [1, 0, 0], light: 0.78 },
  { corners: [[0, 0, 0], [1, 0, 0], [1, 0, 1], [0, 0, 1]], normal: [0, -1, 0], light: 1 },
  { corners: [[0, 1, 0], [1, 1, 0], [1, 1, 1], [0, 1, 1]], normal: [0, 1, 0], light: 1 },
  { corners: [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], normal: [0, 0, -1], light: 0.9 },
  { corners: [[0, 0, 1], [1, 0, 1], [1, 1, 1], [0, 1, 1]], normal: [0, 0, 1], light: 0.9 },
];

// The place of each rank, z nearest: row-major in the order of the mesh's axes.
function ranksOf(mesh) {
  const total = mesh.sizes.reduce((product, size) => product * size, 1);
  return Array.from({ length: total }, (_, rank) => {
    const place = Object.fromEntries(mesh.axes.map((axis) => [axis, 0])); // in the order of the axes
    let rest = rank;
    for (let axis = mesh.axes.length - 1; axis >= 0; axis--) {
      place[mesh.axes[axis]] = rest % mesh.sizes[axis];
      rest = Math.floor(rest / mesh.sizes[axis]);
    }
    return { rank, place };
  });
}

// What a rank holds of a layout: its place in each dim, and the slices.
function blockOf(layout, mesh, place) {
  const size = Object.fromEntries(mesh.axes.map((axis, number) => [axis, mesh.sizes[number]]));
  if (layout.owner.length && (place[layout.owner[0]] ?? 0) !== (place[layout.owner[1]] ?? 0)) return null;
  const indices = layout.dims.map((dim) => dim.axes.reduce((index, axis) => index * size[axis] + place[axis], 0));
  const slices = layout.dims.map((dim, number) => dim.slices[indices[number]]);
  return { indices, slices, id: indices.join(",") };
}

// A colour for each block: the first dim that is split gives the hue, the second the lightness, the third the saturation.
function colourOf(layout, block) {
  if (!block) return [0, 0, 85];
  const split = layout.dims.map((dim, number) => [dim.slices.length, block.indices[number]]).filter(([count]) => count > 1);
  if (!split.length) return [210, 55, 60];
  const share = ([count, index] = [1, 0]) => (count > 1 ? index / (count - 1) : 0.5);
  const [count, index] = split[0];
  return [(360 * index) / count, 80 - 45 * (split.length > 2 ? share(split[2]) : 0), 38 + 40 * share(split[1])];
}

// Draw the mesh of ranks; hovering or clicking a rank tells what it holds.
class Cube {
  constructor(mesh, layout, tell) {
    this.mesh = mesh;
    this.layout = layout;
    this.tell = tell;
    this.turn = { around: -0.6, over: 0.5 };
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("class", "cube");
    this.svg.setAttribute("viewBox", "-150 -130 300 260");
    this.ranks = ranksOf(mesh).map(({ rank, place }) => {
      const block = blockOf(layout, mesh, place);
      return { rank, place, block, colour: colourOf(layout, block), at: this.position(place) };
    });
    this.listen();
    this.draw();
    this.hold(this.ranks[0]);
  }

  // A rank's corner in space: x to the right, y down, z away; replicas along data stand side by side.
  position(place) {
    const size = (axis) => this.mesh.sizes[this.mesh.axes.indexOf(axis)] ?? 1;
    const beside = (place.data ?? 0) * (size("x") + 1);
    const far = [(size("data") - 1) * (size("x") + 1) + size("x") - 1, size("y") - 1, size("z") - 1];
    this.far = far;
    return [beside + place.x - far[0] / 2, place.y - far[1] / 2, place.z - far[2] / 2];
  }

  project([x, y, z]) {
    const { around, over } = this.turn;
    const [turnedX, turnedZ] = [x * Math.cos(around) - z * Math.sin(around), x * Math.sin(around) + z * Math.cos(around)];
    const [turnedY, depth] = [y * Math.cos(over) - turnedZ * Math.sin(over), y * Math.sin(over) + turnedZ * Math.cos(over)];
    const unit = 265 / (Math.hypot(...this.far.map((length) => length + 1.3)));
    return { x: turnedX * unit, y: turnedY * unit, depth };
  }

  draw() {
    const towards = FACES.filter((face) => this.project(face.normal).depth < 0);
    const ordered = this.ranks.map((rank) => ({ rank, depth: this.project(rank.at).depth })).sort((a, b) => b.depth - a.depth);
    const parts = ordered.map(({ rank }) => this.box(rank, towards));
    this.svg.replaceChildren(...parts, ...this.axisNames());
    this.markAlike();
  }

  box(rank, faces) {
    const group = document.createElementNS(SVG, "g");
    group.setAttribute("class", "rank");
    group.dataset.rank = rank.rank;
    group.dataset.block = rank.block ? rank.block.id : "none";
    const [hue, saturation, lightness] = rank.colour;
    for (const { corners, light } of faces) {
      const polygon = document.createElementNS(SVG, "polygon");
      const points = corners.map((corner) => this.project(corner.map((side, axis) => rank.at[axis] + (side - 0.5) * SIDE)));
      polygon.setAttribute("points", points.map((point) => `${point.x.toFixed(1)},${point.y.toFixed(1)}`).join(" "));
      polygon.setAttribute("fill", `hsl(${hue} ${saturation}% ${lightness * light}%)`);
      group.append(polygon);
    }
    return group;
  }

  axisNames() {
    const [x, y, z] = this.far.map((length) => length / 2 + 0.8);
    const ends = { x: [0, y, -z], y: [-x, 0, -z], z: [x, y, 0] };
    if (this.mesh.axes.includes("data")) ends.data = [0, -y, z];
    return Object.entries(ends).map(([axis, at]) => {
      const text = document.createElementNS(SVG, "text");
      const { x: left, y: top } = this.project(at);
      text.setAttribute("x", left);
      text.setAttribute("y", top + 4);
      text.textContent = `${axis} = ${this.mesh.sizes[this.mesh.axes.indexOf(axis)]}`;
      return text;
    });
  }

  // Tell what a rank holds, and outline the ranks that hold the same block.
  hold(rank) {
    this.held = rank;
    this.markAlike();
    this.tell(rank, this.ranks.filter((other) => other.block?.id === rank.block?.id).length);
  }

  markAlike() {
    const id = this.held && (this.held.block ? this.held.block.id : "none");
    for (const group of this.svg.querySelectorAll(".rank")) group.classList.toggle("alike", group.dataset.block === id);
  }

  listen() {
    let last = null;
    const rankAt = (event) => this.ranks[event.target.closest?.(".rank")?.dataset.rank];
    this.svg.addEventListener("pointerdown", (event) => {
      last = { x: event.clientX, y: event.clientY };
      this.svg.setPointerCapture?.(event.pointerId);
      const rank = rankAt(event);
      if (rank) this.hold(rank);
    });
    this.svg.addEventListener("pointermove", (event) => {
      if (!last) {
        const rank = rankAt(event);
        if (rank && rank !== this.held) this.hold(rank);
        return;
      }
      this.turn.around -= (event.clientX - last.x) * 0.01;
      this.turn.over = Math.max(-1.5, Math.min(1.5, this.turn.over + (event.clientY - last.y) * 0.01));
      last = { x: event.clientX, y: event.clientY };
      this.draw();
    });
    this.svg.addEventListener("pointerup", () => { last = null; });
  }
}
