// The first page: all programs, with the figures that matter on top.

import { announce, go, h, setAttribute, setText } from "./dom.js";
import { ago, compact, count, DASH, seconds, slowdown, STATES } from "./format.js";
import { GROUPS, makeFilter, makeOrder } from "./filter.js";
import { Grid } from "./grid.js";
import { sparkline } from "./chart.js";

const COLUMNS = [
  { key: "name", label: "Program" },
  { key: "framework", label: "Framework" },
  { key: "state", label: "State" },
  { key: "level", label: "Level", number: true, title: "queue level of its latest call; 1 is served first" },
  { key: "calls", label: "Calls", number: true, title: "calls begun; those in flight after the dot" },
  { key: "service_s", label: "Service", number: true, title: "model execution it has had" },
  { key: "wait_s", label: "Wait", number: true, title: "time its calls were runnable and did not run" },
  { key: "engine", label: "Engine" },
  { key: "slowdown", label: "Slowdown", number: true, title: "(service + wait) ÷ service; 1 never waited" },
  { key: "last_s", label: "Last call", number: true },
];

const kept = { text: "", group: "all", sort: { key: "last_s", down: true }, top: 0, active: null };

export class ProgramsPage {
  title = "Programs";

  constructor(live) {
    this.live = live;
    this.tiles = h("section", { class: "tiles", "aria-label": "At a glance" });
    this.input = h("input", {
      type: "search", id: "filter", placeholder: "Filter by name, framework, engine, id", "aria-label": "Filter",
      autocomplete: "off", spellcheck: "false", maxlength: "200", value: kept.text, "aria-keyshortcuts": "/",
      oninput: () => this.#filtered(),
      onkeydown: (event) => this.#inputKey(event),
    });
    this.groups = h("div", { class: "chips", role: "group", "aria-label": "States" },
      Object.entries(GROUPS).map(([key, { label }]) =>
        h("button", { type: "button", class: "chip", "data-group": key, "aria-pressed": "false",
          onclick: () => this.#setGroup(key) },
        h("span", { text: label }), h("b", { text: "" }))));
    this.sorter = h("label", { class: "sorter" }, h("span", { class: "visually-hidden", text: "Sort by" }),
      h("select", { onchange: (event) => this.#pickSort(event.target.value) },
        COLUMNS.flatMap(({ key, label }) => [
          h("option", { value: `${key} down`, text: `${label} ↓` }),
          h("option", { value: `${key} up`, text: `${label} ↑` }),
        ])));
    this.shown = h("span", { class: "muted small shown" });
    this.empty = h("div", { class: "empty", hidden: true });
    this.grid = new Grid({
      label: "Programs", columns: COLUMNS, sort: kept.sort,
      rowOf: (id) => live.rows.get(id),
      render: (row, cells, element) => this.#render(row, cells, element),
      open: (id) => go(`#/program/${id}`),
      onSort: (sort) => this.#sorted(sort),
    });
    this.grid.active = kept.active;
    this.element = h("div", { class: "page programs" },
      h("h1", { class: "visually-hidden", text: "Programs" }),
      this.tiles,
      h("div", { class: "tools" },
        h("div", { class: "search" }, this.input, h("kbd", { "aria-hidden": "true", text: "/" })),
        this.groups, this.sorter, this.shown),
      h("div", { class: "grid-frame" }, this.grid.element, this.empty));
    this.#showSort();
  }

  start() {
    this.#arrange();
    this.glance();
    requestAnimationFrame(() => { this.grid.scroller.scrollTop = kept.top; });
  }

  stop() {
    kept.top = this.grid.scroller.scrollTop;
    kept.active = this.grid.active;
    this.grid.resizes.disconnect();
  }

  onRows() {
    this.#arrange();
  }

  onTick() {
    this.glance();
    this.grid.draw(); // ages
  }

  focusFilter() {
    this.input.focus();
    this.input.select();
  }

  #filtered() {
    kept.text = this.input.value;
    this.grid.scroller.scrollTop = 0;
    this.#arrange();
    announce(`${count(this.grid.order.length)} programs`);
  }

  #inputKey(event) {
    if (event.key === "Escape" && this.input.value) {
      this.input.value = "";
      this.#filtered();
      event.preventDefault();
    } else if (event.key === "ArrowDown" || event.key === "Enter" || event.key === "Escape") {
      event.preventDefault();
      this.grid.element.focus();
    }
  }

  #setGroup(key) {
    kept.group = key;
    this.grid.scroller.scrollTop = 0;
    this.#arrange();
    announce(`${count(this.grid.order.length)} programs`);
  }

  #pickSort(value) {
    const [key, way] = value.split(" ");
    this.grid.sort = { key, down: way === "down" };
    this.grid.showSort();
    this.#sorted(this.grid.sort);
  }

  #sorted(sort) {
    kept.sort = sort;
    this.#showSort();
    this.#arrange();
    const { label } = COLUMNS.find((column) => column.key === sort.key);
    announce(`Sorted by ${label}, ${sort.down ? "descending" : "ascending"}`);
  }

  #showSort() {
    const { key, down } = kept.sort;
    this.sorter.querySelector("select").value = `${key} ${down ? "down" : "up"}`;
  }

  #arrange() {
    const { rows, column } = this.live;
    if (column.id === undefined) return;
    const matches = makeFilter(kept.text, column);
    const { has } = GROUPS[kept.group];
    const counts = Object.fromEntries(Object.keys(GROUPS).map((key) => [key, 0]));
    const kinds = Object.entries(GROUPS);
    const found = [];
    for (const row of rows.values()) {
      if (!matches(row)) continue;
      const state = row[column.state];
      for (const [key, group] of kinds) if (group.has(state)) counts[key]++;
      if (has(state)) found.push(row);
    }
    found.sort(makeOrder(kept.sort, column));
    for (const chip of this.groups.children) {
      setText(chip.lastChild, compact(counts[chip.dataset.group]));
      setAttribute(chip, "aria-pressed", chip.dataset.group === kept.group);
    }
    setText(this.shown, found.length === rows.size ? `${count(rows.size)} programs`
      : `${count(found.length)} of ${count(rows.size)}`);
    this.#showEmpty(found.length, rows.size);
    this.grid.show(found.map((row) => row[column.id]));
  }

  #showEmpty(shown, all) {
    const wasHidden = this.empty.hidden;
    this.empty.hidden = shown > 0 || this.live.state === "filling" || this.live.state === "connecting";
    if (this.empty.hidden || (!wasHidden && this.empty.dataset.all === String(all > 0))) return;
    this.empty.dataset.all = String(all > 0);
    this.empty.replaceChildren(...(all
      ? [h("h2", { text: "No program matches" }),
        h("p", { text: "Press Esc in the filter to see all of them." }),
        h("button", { type: "button", class: "quiet", text: "Clear the filter", onclick: () => {
          this.input.value = "";
          kept.group = "all";
          this.#filtered();
        } })]
      : [h("h2", { text: "No programs yet" }),
        h("p", { text: "They appear with their first call. Point an agent at this server:" }),
        h("pre", { text: "export OPENAI_BASE_URL=http://HOST:PORT/v1\nautellix run agent.py" })]));
  }

  #render(row, cells, element) {
    if (!row) return;
    const { live } = this;
    const at = (name) => live.get(row, name);
    const [name, framework, state, level, calls, service, wait, engine, slow, last] = cells;
    let link = name.firstChild;
    if (!link) {
      link = h("a", { tabindex: "-1" });
      name.append(link, h("span", { class: "sub" }));
      state.append(h("span", { class: "pill" }));
      calls.append(h("span"), h("i", { class: "inflight" }));
      slow.append(h("span", { class: "meter", "aria-hidden": "true" }, h("i")), h("span"));
    }
    setText(link, at("name"));
    setAttribute(link, "href", `#/program/${at("id")}`);
    setAttribute(link, "title", at("name"));
    setText(name.lastChild, at("id").slice(0, 8));
    setText(framework, at("framework") ?? DASH);
    const kind = at("state");
    setAttribute(state.firstChild, "data-state", kind);
    setText(state.firstChild, STATES[kind]?.label ?? kind);
    setText(level, at("level") === null ? DASH : String(at("level")));
    setText(calls.firstChild, count(at("calls")));
    setText(calls.lastChild, at("in_flight") ? `· ${at("in_flight")}` : "");
    setAttribute(calls.lastChild, "title", `${at("in_flight")} in flight`);
    setText(service, seconds(at("service_s")));
    setText(wait, at("slowdown") === null && at("wait_s") === 0 ? DASH : seconds(at("wait_s")));
    setText(engine, at("engine") ?? DASH);
    const factor = at("slowdown");
    setText(slow.lastChild, slowdown(factor));
    const share = factor === null ? 0 : Math.min(1, Math.log2(Math.max(1, factor)) / 5);
    slow.firstChild.firstChild.style.width = `${share * 100}%`;
    setAttribute(slow, "data-heat", factor === null ? "none" : factor < 2 ? "low" : factor < 6 ? "mid" : "high");
    const silent = live.now() - at("last_s");
    setText(last, at("in_flight") ? "now" : ago(silent));
    setAttribute(element, "data-over", kind === "ended" || kind === "expired");
  }

  glance() {
    const { live } = this;
    const sample = live.samples.at(-1) ?? [0, 0, 0, 0, []];
    const spread = live.fairness?.percentiles;
    const ready = live.engines.filter((engine) => engine.state === "ready").length;
    const told = live.engines.some((engine) => engine.running !== null);
    const inFlight = live.samples.slice(-120).map((one) => one[1]);
    const waiting = live.samples.slice(-120).map((one) => one[3]);
    this.#tile(0, "Programs", count(live.rows.size),
      `${count(live.rows.size ? this.#countOpen() : 0)} open`);
    this.#tile(1, "Calls in flight", count(sample[1]), told ? `${count(sample[2])} running` : "of all programs", inFlight);
    this.#tile(2, "Waiting", told ? count(sample[3]) : DASH, told ? "in the engines' queues" : "engines do not tell", waiting);
    this.#tile(3, "Slowdown", slowdown(spread?.["50"]), spread ? `median; ${slowdown(spread["99"])} at P99` : "no reports yet");
    this.#tile(4, "Engines ready", `${ready} / ${live.engines.length}`, live.about.policy ? `policy ${live.about.policy}` : "");
  }

  #countOpen() {
    const index = this.live.column.state;
    let open = 0;
    for (const row of this.live.rows.values()) open += GROUPS.open.has(row[index]);
    return open;
  }

  #tile(index, label, value, note, values = null) {
    let tile = this.tiles.children[index];
    if (!tile) {
      tile = h("div", { class: "tile" }, h("div", { class: "tile-label" }), h("div", { class: "tile-value" }),
        h("div", { class: "tile-note muted" }), h("div", { class: "tile-chart", "aria-hidden": "true" }));
      this.tiles.append(tile);
    }
    setText(tile.children[0], label);
    setText(tile.children[1], value);
    setText(tile.children[2], note);
    if (values) sparkline(tile.children[3], values);
  }
}
