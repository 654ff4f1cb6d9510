// What each call did, and when: one lane a thread, one colour a phase.

import { h, s, setAttribute } from "./dom.js";
import { isNumber, PHASES, seconds } from "./format.js";
import { keyOf, lanesOf, nameOf } from "./dag.js";

const LANE = 30;
const BAR = 16;
const LABEL = 74;
const AXIS = 24;
const LANES_APART_MAX = 40; // more threads share lanes
const TOOL_S_MIN = 0.02;
const ZOOM_MAX = 64;

function niceStep(span, wanted) {
  const rough = span / wanted;
  const size = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((one) => one * size).find((step) => step >= rough);
}

export class Timeline {
  zoom = 1;

  constructor(pick) {
    this.pick = pick;
    this.scroller = h("div", { class: "timeline-scroll", tabindex: "0", role: "group", "aria-label": "Timeline, scrollable" });
    this.labels = h("div", { class: "timeline-labels", "aria-hidden": "true" });
    const button = (text, label, factor) => h("button", { type: "button", class: "icon-button", text, "aria-label": label,
      title: label, onclick: () => this.#zoomBy(factor) });
    this.legend = h("ul", { class: "legend" }, ["gateway", "queued", "running", "preempted", "swapped", "engine", "answering", "tool"]
      .map((phase) => h("li", { "data-tip": PHASES[phase].label }, h("i", { class: `p-${phase}`, "aria-hidden": "true" }), PHASES[phase].short)));
    this.element = h("div", { class: "timeline" },
      h("div", { class: "timeline-tools" }, this.legend,
        h("div", { class: "zoom", role: "group", "aria-label": "Zoom" }, button("−", "Zoom out", 0.5), button("⤢", "Fit", 0), button("+", "Zoom in", 2))),
      h("div", { class: "timeline-body" }, this.labels, this.scroller));
    this.resizes = new ResizeObserver(() => this.#draw());
    this.resizes.observe(this.scroller);
  }

  show(calls, now, isOpen) {
    this.calls = calls;
    this.now = now;
    this.isOpen = isOpen;
    this.#draw();
  }

  #zoomBy(factor) {
    const { scroller } = this;
    const middle = (scroller.scrollLeft + scroller.clientWidth / 2) / Math.max(1, scroller.scrollWidth);
    this.zoom = factor ? Math.max(1, Math.min(ZOOM_MAX, this.zoom * factor)) : 1;
    this.#draw();
    scroller.scrollLeft = middle * scroller.scrollWidth - scroller.clientWidth / 2;
  }

  #draw() {
    const { calls, scroller } = this;
    if (!calls?.length || !scroller.clientWidth) return;
    const follows = scroller.scrollLeft + scroller.clientWidth >= scroller.scrollWidth - 4;
    const begin = Math.min(...calls.map((call) => call.begun_s));
    const ends = calls.map((call) => call.ended_s ?? this.now);
    const end = Math.max(...ends, this.isOpen ? this.now : 0, begin + 0.05);
    const width = scroller.clientWidth * this.zoom;
    const x = (time) => 6 + ((time - begin) / (end - begin)) * (width - 12);
    const threads = [...Map.groupBy(calls, (call) => call.thread)].sort(([a], [b]) => a - b);
    const lanes = this.#lanes(threads);
    const height = AXIS + lanes.count * LANE + 6;
    const parts = this.#axis(begin, end, x, width, height);
    for (const [thread, own] of threads) {
      const top = AXIS + lanes.lanes.get(thread) * LANE + (LANE - BAR) / 2;
      parts.push(...this.#gaps(own, x, top), ...own.flatMap((call) => this.#bars(call, x, top, begin)));
    }
    const label = `Timeline of ${calls.length} calls in ${threads.length} threads over ${seconds(end - begin)}. ` +
      "The table of calls below says the same in words.";
    scroller.replaceChildren(s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, parts));
    this.#showLabels(threads, lanes);
    if (follows && this.zoom > 1) scroller.scrollLeft = scroller.scrollWidth;
  }

  #lanes(threads) {
    if (threads.length <= LANES_APART_MAX) {
      return { lanes: new Map(threads.map(([thread], index) => [thread, index])), count: threads.length };
    }
    return lanesOf(threads.map(([id, own]) => ({
      id, first: own[0].begun_s, last: Math.max(...own.map((call) => call.ended_s ?? this.now)),
    })));
  }

  #showLabels(threads, { lanes, count }) {
    const names = Array.from({ length: count }, () => []);
    for (const [thread] of threads) names[lanes.get(thread)].push(thread);
    this.labels.replaceChildren(...names.map((own) => {
      const text = own.length > 1 ? `${own.length} threads` : `thread ${own[0]}`;
      const label = h("div", { class: "lane-label", text });
      return label;
    }));
    setAttribute(this.labels, "data-lanes", count);
  }

  #axis(begin, end, x, width, height) {
    const parts = [];
    const step = niceStep(end - begin, Math.max(3, width / 110));
    for (let at = 0; at <= end - begin + step / 100; at += step) {
      const left = x(begin + at);
      const anchor = left > width - 24 ? "end" : at === 0 ? "start" : "middle";
      parts.push(s("line", { class: "rule", x1: left, x2: left, y1: AXIS - 4, y2: height }),
        s("text", { class: "tick", x: left, y: 14, "text-anchor": anchor, text: at === 0 ? "0 s" : seconds(at) }));
    }
    return parts;
  }

  #gaps(own, x, top) {
    const parts = [];
    const sorted = [...own].sort((a, b) => a.begun_s - b.begun_s);
    const gap = (from, to) => {
      if (to - from < TOOL_S_MIN) return;
      parts.push(s("line", { class: "gap p-tool", x1: x(from) + 1, x2: x(to) - 1, y1: top + BAR / 2, y2: top + BAR / 2 }),
        s("rect", { class: "hit", x: x(from), width: Math.max(1, x(to) - x(from)), y: top, height: BAR,
          "data-tip": `tool wait\n${seconds(to - from)}` }));
    };
    sorted.slice(1).forEach((call, index) => {
      if (sorted[index].ended_s !== null) gap(sorted[index].ended_s, call.begun_s);
    });
    return parts;
  }

  #bars(call, x, top, begin) {
    const requests = 1 + Math.max(0, ...call.intervals.map((one) => one.request));
    const bars = call.intervals.map(({ state, start_s: from, end_s: to, level, request }) => {
      const height = state === "gateway" || state === "answering" ? BAR : BAR / requests;
      return s("rect", {
        class: `bar p-${state}`, x: x(from), y: top + (state === "gateway" || state === "answering" ? 0 : request * height),
        width: Math.max(1.5, x(to) - x(from)), height, rx: 2, onclick: () => this.pick(call),
        "data-tip": [`${PHASES[state]?.label ?? state}: ${seconds(to - from)}${isNumber(level) ? `, level ${level}` : ""}`,
          `${nameOf(call)}${call.engine ? ` on ${call.engine}` : ""}`,
          `from ${seconds(from - begin)} to ${seconds(to - begin)}`].join("\n"),
      });
    });
    return [s("g", { class: "call", "data-call": keyOf(call.thread, call.seq) }, bars)];
  }
}
