// Queues over time, and whether programs are slowed down alike.

import { h, setAttribute, setText } from "./dom.js";
import { count, DASH, isNumber, seconds, slowdown } from "./format.js";
import { TimeChart } from "./chart.js";

const SPANS = [[60, "1 min"], [300, "5 min"], [900, "15 min"]];
const MARKS = ["0", "25", "50", "75", "90", "99", "100"];
const MARK_NAMES = { 0: "least", 25: "25 %", 50: "median", 75: "75 %", 90: "90 %", 99: "99 %", 100: "most" };
let span = 300;

export class LoadPage {
  title = "Queues and fairness";

  constructor(live) {
    this.live = live;
    this.calls = new TimeChart({
      label: "Calls over time", span,
      areas: [{ name: "running", class: "c-running", of: (one) => one[2] },
        { name: "waiting", class: "c-queued", of: (one) => one[3] }],
      lines: [{ name: "in flight at the gateway", class: "c-flight", of: (one) => one[1] }],
    });
    this.levels = new TimeChart({ label: "Waiting calls by level over time", span, areas: [] });
    this.spans = h("div", { class: "chips", role: "group", "aria-label": "Time shown" },
      SPANS.map(([value, label]) => h("button", {
        type: "button", class: "chip", "data-span": value, text: label, "aria-pressed": String(value === span),
        onclick: () => this.#setSpan(value),
      })));
    this.jain = h("div", { class: "jain" }, h("div", { class: "jain-value" }), h("div", { class: "track" }, h("i")),
      h("p", { class: "muted small" }));
    this.spread = h("ol", { class: "spread" });
    this.classes = h("ol", { class: "classes" });
    this.element = h("div", { class: "page" },
      h("div", { class: "title-row" }, h("h1", { text: "Queues and fairness" }), this.spans),
      h("section", { class: "card", "aria-label": "Calls" }, h("h2", { text: "Calls" }), this.calls.element),
      h("section", { class: "card", "aria-label": "Waiting by level" }, h("h2", { text: "Waiting by level" }), this.levels.element),
      h("div", { class: "cards two" },
        h("section", { class: "card", "aria-label": "Fairness" }, h("h2", { text: "Fairness" }), this.jain),
        h("section", { class: "card", "aria-label": "Slowdown" }, h("h2", { text: "Slowdown of programs" }), this.spread),
        h("section", { class: "card", "aria-label": "Slowdown by size" }, h("h2", { text: "Slowdown by size" }),
          h("p", { class: "muted small", text: "Mean of four equal groups, the programs with the least service first." }), this.classes)));
  }

  start() {
    this.onTick();
  }

  stop() {
    this.calls.resizes.disconnect();
    this.levels.resizes.disconnect();
  }

  onRows() {}

  #setSpan(value) {
    span = this.calls.span = this.levels.span = value;
    for (const chip of this.spans.children) setAttribute(chip, "aria-pressed", Number(chip.dataset.span) === value);
    this.onTick();
  }

  onTick() {
    const { live } = this;
    if (live.column.id === undefined) return;
    const now = live.now();
    this.calls.draw(live.samples, now);
    const levels = Math.max(0, ...live.samples.slice(-span).map((one) => one[4].length));
    if (levels !== this.levels.areas.length) {
      this.levels.setAreas(Array.from({ length: levels }, (_, index) => ({
        name: `level ${index + 1}`, read: `at level ${index + 1}`, class: `c-level-${Math.min(index, 7)}`, of: (one) => one[4][index] ?? 0,
      })));
    }
    this.levels.draw(live.samples, now);
    this.#showFairness(live.fairness);
  }

  #showFairness(fairness) {
    const jain = fairness?.jain;
    setText(this.jain.children[0], isNumber(jain) ? jain.toFixed(2) : DASH);
    this.jain.children[1].firstChild.style.width = `${(jain ?? 0) * 100}%`;
    setText(this.jain.children[2], isNumber(jain)
      ? `Jain's index of the slowdowns of ${count(fairness.programs)} programs: 1 when all are slowed down alike, 1 ÷ n when one bears all.`
      : "No engine has reported a program's wait yet.");
    const marks = fairness?.percentiles;
    const most = marks ? Math.log2(Math.max(2, marks["100"])) : 1;
    bars(this.spread, marks ? MARKS.map((mark) => ({
      name: MARK_NAMES[mark], value: slowdown(marks[mark]), size: Math.log2(Math.max(1, marks[mark])) / most,
    })) : []);
    const classes = fairness?.classes ?? [];
    const worst = Math.log2(Math.max(2, ...classes.map((one) => one.slowdown_mean)));
    bars(this.classes, classes.map((one) => ({
      name: `up to ${seconds(one.service_s_max)}`, value: slowdown(one.slowdown_mean),
      size: Math.log2(Math.max(1, one.slowdown_mean)) / worst,
    })));
  }
}

// Bars of one list: name, bar, figure. Their lengths are logarithms, since slowdowns are ratios.
function bars(list, items) {
  while (list.children.length > items.length) list.lastChild.remove();
  while (list.children.length < items.length) {
    list.append(h("li", {}, h("span", { class: "bar-name" }), h("span", { class: "track", "aria-hidden": "true" }, h("i")), h("b")));
  }
  items.forEach(({ name, value, size }, index) => {
    const [label, track, figure] = list.children[index].children;
    setText(label, name);
    track.firstChild.style.width = `${Math.max(1.5, size * 100)}%`;
    setText(figure, value);
  });
}
