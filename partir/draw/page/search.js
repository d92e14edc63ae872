"use strict";

const MOST_FOUND = 40;

// Search by name: names that begin so, then names that hold it; arrows and return choose.
class Search {
  constructor(input, list, data, onChoose) {
    Object.assign(this, { input, list, data, onChoose });
    this.chosen = 0;
    input.addEventListener("input", () => this.find());
    input.addEventListener("keydown", (event) => this.key(event));
    input.addEventListener("blur", () => setTimeout(() => { list.hidden = true; }, 150));
  }

  matches(text) {
    const wanted = text.toLowerCase();
    const place = (name) => (name === wanted ? 0 : name.startsWith(wanted) ? 1 : 2);
    return this.data.names
      .map(([name, id, layout]) => ({ name, id, layout, lower: name.toLowerCase() }))
      .filter(({ lower }) => lower.includes(wanted))
      .sort((a, b) => place(a.lower) - place(b.lower) || a.name.length - b.name.length)
      .slice(0, MOST_FOUND);
  }

  find() {
    const text = this.input.value.trim();
    this.found = text ? this.matches(text) : [];
    this.choose(0);
    const nothing = element("li", {}, "no such name");
    this.list.replaceChildren(...(this.found.length ? this.found.map((item) => this.item(item)) : [nothing]));
    this.list.hidden = !text;
    this.choose(0);
  }

  item(item) {
    const { stage, kind } = this.data.nodes[item.id];
    return element("li", { onmousedown: () => this.take(item) }, item.name, element("small", {}, `${kind}, ${stage}`));
  }

  choose(number) {
    this.chosen = number;
    [...this.list.children].forEach((line, index) => line.classList.toggle("chosen", index === number));
  }

  key(event) {
    const steps = { ArrowDown: 1, ArrowUp: -1 };
    if (event.key in steps && this.found?.length) {
      this.choose((this.chosen + steps[event.key] + this.found.length) % this.found.length);
      event.preventDefault();
    } else if (event.key === "Enter" && this.found?.length) {
      this.take(this.found[this.chosen]);
    } else if (event.key === "Escape") {
      this.list.hidden = true;
      this.input.blur();
    }
  }

  take(item) {
    this.list.hidden = true;
    this.input.value = item.name;
    this.input.blur();
    this.onChoose(item);
  }
}
