// Small charts as SVG: a sparkline, and areas over time with a ruler under the pointer.

import { h, s, setAttribute, setText } from "./dom.js";
import { count, DASH, isNumber } from "./format.js";

export function sparkline(box, values, height = 28) {
  let svg = box.firstChild;
  if (!svg) {
    svg = s("svg", { class: "spark", viewBox: `0 0 120 ${height}`, preserveAspectRatio: "none" },
      s("path", { class: "spark-area" }), s("path", { class: "spark-line" }));
    box.append(svg);
  }
  const known = values.map((value) => (isNumber(value) ? value : 0));
  const top = Math.max(1, ...known) * 1.1;
  const step = 120 / Math.max(1, known.length - 1);
  const points = known.map((value, i) =>
    `${(i * step).toFixed(1)},${(height - 1 - (value / top) * (height - 3)).toFixed(1)}`);
  const line = points.length > 1 ? `M${points.join("L")}` : "";
  setAttribute(svg.lastChild, "d", line);
  setAttribute(svg.firstChild, "d", line ? `${line}L120,${height}L0,${height}Z` : "");
}

function niceTop(value) {
  if (value <= 4) return 4;
  const size = 10 ** Math.floor(Math.log10(value));
  const step = [1, 2, 4, 6, 8, 10].find((one) => one * size >= value);
  return step * size;
}

// Stacked areas, with lines on top that are not stacked.
export class TimeChart {
  constructor({ label, areas, lines = [], span = 300 }) {
    this.areas = areas; // [{name, read?, class, of(sample)}], the lowest first
    this.lines = lines;
    this.span = span;
    this.svg = s("svg", { class: "time-chart", role: "img", "aria-label": label });
    this.readout = h("div", { class: "chart-readout small muted", "aria-hidden": "true" });
    this.legend = h("ul", { class: "legend" });
    this.element = h("div", { class: "chart" }, this.legend, this.svg, this.readout);
    this.svg.addEventListener("pointermove", (event) => this.#point(event));
    this.svg.addEventListener("pointerleave", () => {
      this.pointer = null;
      this.#ruler();
    });
    this.label = label;
    this.samples = [];
    this.resizes = new ResizeObserver(() => this.draw(this.samples, this.now));
    this.resizes.observe(this.element);
    this.#legend();
  }

  setAreas(areas) {
    this.areas = areas;
    this.#legend();
  }

  #legend() {
    this.legend.replaceChildren(...[...this.areas, ...this.lines].map((one) =>
      h("li", {}, h("i", { class: one.class, "aria-hidden": "true" }), one.name)));
  }

  draw(samples, now) {
    const width = this.element.clientWidth;
    if (!width || now === undefined) return;
    const height = 190;
    const left = 40;
    const bottom = 22;
    const shown = samples.filter((sample) => sample[0] >= now - this.span);
    this.samples = samples;
    this.now = now;
    this.shown = shown;
    const stacks = shown.map((sample) => {
      let sum = 0;
      return this.areas.map((area) => (sum += area.of(sample) || 0));
    });
    const highest = Math.max(1, ...stacks.map((stack) => stack.at(-1) ?? 0),
      ...shown.flatMap((sample) => this.lines.map((line) => line.of(sample) || 0)));
    const top = niceTop(highest);
    this.x = (time) => left + (1 - (now - time) / this.span) * (width - left - 8);
    const y = (value) => 8 + (1 - value / top) * (height - bottom - 8);
    setAttribute(this.svg, "viewBox", `0 0 ${width} ${height}`);
    setAttribute(this.svg, "height", height);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const at = y(top * share);
      parts.push(s("line", { class: "rule", x1: left, x2: width - 8, y1: at, y2: at }),
        s("text", { class: "tick", x: left - 6, y: at + 4, "text-anchor": "end", text: count(top * share) }));
    }
    for (const [seconds, anchor] of [[this.span, "start"], [this.span / 2, "middle"], [0, "end"]]) {
      parts.push(s("text", { class: "tick", x: this.x(now - seconds), y: height - 5, "text-anchor": anchor,
        text: seconds === 0 ? "now" : `−${seconds >= 120 ? `${seconds / 60} min` : `${seconds} s`}` }));
    }
    const path = (values) => values.map((value, i) =>
      `${i ? "L" : "M"}${this.x(shown[i][0]).toFixed(1)},${y(value).toFixed(1)}`).join("");
    if (shown.length > 1) {
      for (let k = this.areas.length - 1; k >= 0; k--) {
        const line = path(stacks.map((stack) => stack[k]));
        const back = stacks.map((stack, i) => [shown[i][0], k ? stack[k - 1] : 0]).reverse()
          .map(([time, value]) => `L${this.x(time).toFixed(1)},${y(value).toFixed(1)}`).join("");
        parts.push(s("path", { class: `area ${this.areas[k].class}`, d: `${line}${back}Z` }));
      }
      for (const line of this.lines) {
        parts.push(s("path", { class: `line ${line.class}`, d: path(shown.map((one) => line.of(one) || 0)) }));
      }
    }
    this.cursor = s("line", { class: "cursor", y1: 8, y2: height - bottom });
    parts.push(this.cursor);
    this.svg.replaceChildren(...parts);
    const latest = shown.at(-1);
    const words = [...this.areas, ...this.lines].map((one) => `${latest ? count(one.of(latest)) : DASH} ${one.read ?? one.name}`);
    setAttribute(this.svg, "aria-label", `${this.label}. Now: ${words.join(", ")}.`);
    this.#ruler();
  }

  #point(event) {
    this.pointer = event.clientX - this.svg.getBoundingClientRect().left;
    this.#ruler();
  }

  #ruler() {
    let sample = this.shown?.at(-1);
    const isPointing = this.pointer !== null && this.pointer !== undefined && this.shown?.length;
    if (isPointing) {
      sample = this.shown.reduce((best, one) =>
        (Math.abs(this.x(one[0]) - this.pointer) < Math.abs(this.x(best[0]) - this.pointer) ? one : best));
      setAttribute(this.cursor, "x1", this.x(sample[0]));
      setAttribute(this.cursor, "x2", this.x(sample[0]));
    }
    if (this.cursor) setAttribute(this.cursor, "visibility", isPointing ? "visible" : "hidden");
    if (!sample) {
      setText(this.readout, "The first samples come in a moment.");
      return;
    }
    const age = Math.round(this.now - sample[0]);
    const words = [...this.areas, ...this.lines].map((one) => `${count(one.of(sample))} ${one.read ?? one.name}`);
    setText(this.readout, `${isPointing && age > 0 ? `${age} s ago` : "Now"}: ${words.join(", ")}`);
  }
}
