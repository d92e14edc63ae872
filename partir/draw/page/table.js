"use strict";

const COLUMNS = [
  { title: "#", number: true, value: (row) => row.place },
  { title: "collective", value: (row) => row.moves.op },
  { title: "axis", value: (row) => row.moves.axis },
  { title: "bytes", number: true, value: (row) => row.moves.bytes },
  { title: "each", number: true, value: (row) => row.moves.each },
  { title: "layers", number: true, value: (row) => row.moves.count },
  { title: "stage", value: (row) => row.stage },
  { title: "module", value: (row) => row.path },
  { title: "for", value: (row) => row.moves.reason },
  { title: "line", value: (row) => row.moves.source },
];

// The table of collectives: sorts by any column, a row selects its node.
class Table {
  constructor(place, data, onSelect) {
    this.data = data;
    this.onSelect = onSelect;
    this.order = { column: COLUMNS[0], descending: false };
    this.stages = ["forward", "backward"];
    const rows = Object.entries(data.nodes).filter(([, node]) => node.moves).map(([id, node]) => ({ ...node, id }));
    rows.sort((a, b) => b.moves.bytes - a.moves.bytes).forEach((row, index) => { row.place = index + 1; });
    this.rows = rows;
    this.most = rows[0]?.moves.bytes ?? 1;
    this.head = element("tr", {}, ...COLUMNS.map((column) => this.heading(column)));
    this.body = element("tbody");
    place.replaceChildren(element("table", {}, element("thead", {}, this.head), this.body));
    this.fill();
  }

  heading(column) {
    const cell = element("th", { className: column.number ? "number" : "" }, column.title);
    cell.onclick = () => this.sort(column);
    return cell;
  }

  // Sort by a column; once more turns the order round. Numbers begin with the largest, places with the first.
  sort(column) {
    const same = this.order.column === column;
    const descending = same ? !this.order.descending : Boolean(column.number) && column.title !== "#";
    this.order = { column, descending };
    this.fill();
  }

  only(stages) {
    this.stages = stages;
    this.fill();
  }

  mark(id) {
    this.marked = id;
    for (const row of this.body.children) row.classList.toggle("selected", row.dataset.id === id);
    this.body.querySelector(".selected")?.scrollIntoView({ block: "nearest" });
  }

  fill() {
    const { column, descending } = this.order;
    const compare = (a, b) => (column.number ? column.value(a) - column.value(b) : column.value(a).localeCompare(column.value(b)));
    const shown = this.rows.filter((row) => this.stages.includes(row.stage));
    shown.sort((a, b) => (descending ? -1 : 1) * compare(a, b) || a.place - b.place);
    this.body.replaceChildren(...shown.map((row) => this.row(row)));
    [...this.head.children].forEach((cell, index) => {
      const order = descending ? "descending" : "ascending";
      cell.setAttribute("aria-sort", COLUMNS[index] === column ? order : "none");
    });
    this.mark(this.marked);
  }

  row(row) {
    const cells = COLUMNS.map((column) => this.cell(column, row));
    const made = element("tr", { onclick: () => this.onSelect(row.id) }, ...cells);
    made.dataset.id = row.id;
    return made;
  }

  cell(column, row) {
    const value = column.value(row);
    const cell = element("td", { className: column.number ? "number" : "" }, column.number ? value.toLocaleString("en-US") : value);
    if (column.title === "axis") {
      const colours = row.moves.axis.split(".").map((axis) => this.data.colours[axis]);
      const background = colours.length > 1 ? `linear-gradient(90deg, ${colours.join(", ")})` : colours[0];
      cell.replaceChildren(element("span", { className: "axis", style: `background: ${background}` }, value));
    }
    if (column.title === "bytes") {
      const colour = this.data.colours[row.moves.axis.split(".")[0]];
      const length = Math.max(1, Math.round((90 * row.moves.bytes) / this.most));
      cell.prepend(element("span", { className: "bar", style: `width: ${length}px; background: ${colour}` }));
    }
    return cell;
  }
}
