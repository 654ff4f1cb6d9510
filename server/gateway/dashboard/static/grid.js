// A table of any length: only the rows in sight exist, and are used again while it scrolls.
// To a screen reader it is a grid with all its rows; the keyboard moves an active row by its id.

import { h, setAttribute } from "./dom.js";

const OVERSCAN = 6;

export class Grid {
  order = []; // ids, as they are shown
  active = null;
  #rows = new Map(); // index → element
  #pool = [];
  #height = 0;
  #frame = 0;

  // columns: {key, label, title?, number?, sort?, cell(row, cells…)}; see programs.js
  constructor({ label, columns, rowOf, render, open, sort, onSort }) {
    this.columns = columns;
    this.rowOf = rowOf;
    this.render = render;
    this.open = open;
    this.sort = sort;
    this.onSort = onSort;
    this.head = h("div", { class: "grid-row grid-head", role: "row", "aria-rowindex": "1" },
      columns.map((column, index) => this.#headCell(column, index)));
    this.canvas = h("div", { class: "grid-canvas", role: "rowgroup" });
    this.scroller = h("div", { class: "grid-scroll", role: "presentation", tabindex: "-1" }, this.canvas);
    this.element = h("div", {
      class: "grid", role: "grid", tabindex: "0", "aria-label": label, "aria-readonly": "true",
      "aria-colcount": columns.length,
    }, h("div", { role: "rowgroup", class: "grid-headgroup" }, this.head), this.scroller);
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("click", (event) => this.#click(event));
    this.resizes = new ResizeObserver(() => {
      this.#height = 0;
      this.draw();
    });
    this.resizes.observe(this.scroller);
    this.showSort();
  }

  #headCell(column, index) {
    const button = h("button", {
      type: "button", tabindex: "-1", title: column.title, text: column.label,
      onclick: () => this.sortBy(column.key),
    });
    return h("div", {
      class: `cell c-${column.key}${column.number ? " number" : ""}`, role: "columnheader",
      "aria-colindex": index + 1, "data-key": column.key,
    }, button);
  }

  sortBy(key) {
    const column = this.columns.find((one) => one.key === key);
    const down = this.sort.key === key ? !this.sort.down : Boolean(column.number);
    this.sort = { key, down };
    this.showSort();
    this.onSort(this.sort);
  }

  showSort() {
    for (const cell of this.head.children) {
      const isKey = cell.dataset.key === this.sort.key;
      setAttribute(cell, "aria-sort", isKey ? (this.sort.down ? "descending" : "ascending") : "none");
    }
  }

  show(order) {
    this.order = order;
    setAttribute(this.element, "aria-rowcount", order.length + 1);
    if (this.active !== null && !order.includes(this.active)) this.active = null;
    this.draw();
  }

  // Draw what is in sight, at the next frame at the latest.
  draw() {
    if (!this.#frame) this.#frame = requestAnimationFrame(() => {
      this.#frame = 0;
      this.#draw();
    });
  }

  get rowHeight() {
    if (!this.#height) {
      const text = getComputedStyle(this.element).getPropertyValue("--row");
      this.#height = Number.parseFloat(text) || 40;
    }
    return this.#height;
  }

  #draw() {
    const height = this.rowHeight;
    const { scrollTop, clientHeight } = this.scroller;
    this.canvas.style.height = `${this.order.length * height}px`;
    const first = Math.max(0, Math.floor(scrollTop / height) - OVERSCAN);
    const last = Math.min(this.order.length, Math.ceil((scrollTop + clientHeight) / height) + OVERSCAN);
    for (const [index, element] of this.#rows) {
      if (index >= first && index < last) continue;
      this.#rows.delete(index);
      this.#pool.push(element);
    }
    for (let index = first; index < last; index++) this.#drawRow(index, height);
    for (const element of this.#pool) {
      if (element.hidden) continue;
      element.hidden = true;
      element.removeAttribute("id"); // it may be another row's by now
    }
    if (this.active === null) this.element.removeAttribute("aria-activedescendant");
    else setAttribute(this.element, "aria-activedescendant", `row-${this.active}`);
  }

  #drawRow(index, height) {
    const id = this.order[index];
    let element = this.#rows.get(index);
    if (!element) {
      element = this.#pool.pop() ?? this.#newRow();
      if (element.hidden) element.hidden = false;
      this.#rows.set(index, element);
    }
    element.style.transform = `translateY(${index * height}px)`;
    setAttribute(element, "aria-rowindex", index + 2);
    setAttribute(element, "id", `row-${id}`);
    setAttribute(element, "aria-selected", id === this.active);
    element.dataset.id = id;
    this.render(this.rowOf(id), element.children, element);
  }

  #newRow() {
    const row = h("div", { class: "grid-row", role: "row" }, this.columns.map((column, index) =>
      h("div", {
        class: `cell c-${column.key}${column.number ? " number" : ""}`, role: "gridcell",
        "aria-colindex": index + 1,
      })));
    this.canvas.append(row);
    return row;
  }

  #click(event) {
    const row = event.target.closest(".grid-row");
    if (!row || event.target.closest("a")) return;
    this.active = row.dataset.id;
    this.open(row.dataset.id);
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / this.rowHeight) - 1);
    const at = this.active === null ? -1 : this.order.indexOf(this.active);
    const steps = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page,
      Home: 0, End: this.order.length - 1 };
    if (event.key in steps) {
      event.preventDefault();
      this.#activate(steps[event.key]);
    } else if (event.key === "Enter" && this.active !== null) {
      event.preventDefault();
      this.open(this.active);
    } else if (event.key === "Escape" && this.active !== null) {
      this.active = null;
      this.draw();
    }
  }

  #activate(index) {
    if (!this.order.length) return;
    const to = Math.max(0, Math.min(this.order.length - 1, index));
    this.active = this.order[to];
    const top = to * this.rowHeight;
    const { scrollTop, clientHeight } = this.scroller;
    if (top < scrollTop) this.scroller.scrollTop = top;
    else if (top + this.rowHeight > scrollTop + clientHeight) {
      this.scroller.scrollTop = top + this.rowHeight - clientHeight;
    }
    this.draw();
  }
}

