// The engines: how full, how fast, how well they find what they have computed before.

import { h, setAttribute, setText } from "./dom.js";
import { ago, count, DASH, isNumber, percent, seconds } from "./format.js";
import { sparkline } from "./chart.js";

const ENGINE_STATES = {
  starting: "Starting", ready: "Ready", frozen: "Frozen", draining: "Draining", dead: "Dead",
};
const LATE_S = 3;

export class EnginesPage {
  title = "Engines";

  constructor(live) {
    this.live = live;
    this.cards = h("div", { class: "cards" });
    this.empty = h("div", { class: "empty", hidden: true }, h("h2", { text: "No engines" }),
      h("p", { text: "This server has none yet." }));
    this.element = h("div", { class: "page" }, h("h1", { text: "Engines" }), this.cards, this.empty);
    this.known = new Map();
  }

  start() {
    this.onTick();
  }

  onRows() {}

  stop() {}

  onTick() {
    const { engines } = this.live;
    this.empty.hidden = engines.length > 0 || this.live.column.id === undefined;
    const names = new Set(engines.map((engine) => engine.engine));
    for (const [name, card] of this.known) {
      if (!names.has(name)) {
        card.element.remove();
        this.known.delete(name);
      }
    }
    for (const engine of engines) {
      let card = this.known.get(engine.engine);
      if (!card) {
        card = new Card(engine.engine);
        this.known.set(engine.engine, card);
        this.cards.append(card.element);
      }
      card.show(engine, this.live.rates.get(engine.engine) ?? []);
    }
  }
}

class Card {
  constructor(name) {
    this.pill = h("span", { class: "pill" });
    this.beat = h("span", { class: "beat small" }, h("i", { "aria-hidden": "true" }), h("span"));
    this.load = new Gauge("Load", "calls running in the engine's slots");
    this.kv = new Gauge("KV cache", "blocks in use");
    this.hits = new Gauge("Prefix hits", "prompt tokens found in the cache, of all");
    this.rate = h("div", { class: "rate-value" });
    this.chart = h("div", { class: "rate-chart", "aria-hidden": "true" });
    this.levels = h("div", { class: "levels" });
    this.levelsPart = h("div", { class: "levels-part" }, h("div", { class: "gauge-name", text: "Waiting by level" }), this.levels);
    this.facts = h("dl", { class: "facts" });
    const id = `engine-${name}`;
    this.element = h("section", { class: "card engine", "aria-labelledby": id },
      h("header", {}, h("h2", { id, text: name }), this.pill, this.beat),
      this.load.element, this.kv.element, this.hits.element,
      h("div", { class: "rate" }, h("div", {}, h("div", { class: "gauge-name", text: "Steps a second" }), this.rate), this.chart),
      this.levelsPart, this.facts);
  }

  show(engine, rates) {
    setAttribute(this.pill, "data-state", engine.state);
    setText(this.pill, ENGINE_STATES[engine.state] ?? engine.state);
    const age = engine.heard_age_s;
    const late = isNumber(age) && age > LATE_S;
    setAttribute(this.beat, "data-late", late);
    setText(this.beat.lastChild, isNumber(age) ? `heartbeat ${age < 1.5 ? "now" : ago(age)}` : "no control channel");
    const told = isNumber(engine.running);
    this.load.show(told && engine.slots ? engine.running / engine.slots : null,
      told ? `${count(engine.running)} / ${count(engine.slots)} slots, ${count(engine.waiting)} waiting`
        : `${count(engine.calls)} calls of this gateway`);
    this.kv.show(engine.kv_use, isNumber(engine.kv_blocks) ? `of ${count(engine.kv_blocks)} blocks` : "not told");
    this.hits.show(engine.hit_share, isNumber(engine.hit_share) ? "of prompt tokens" : "nothing reported yet", true);
    setText(this.rate, isNumber(engine.steps_per_s) ? engine.steps_per_s.toFixed(1) : DASH);
    sparkline(this.chart, rates.slice(-120));
    this.#showLevels(engine.levels);
    this.#showFacts(engine);
  }

  #showLevels(levels) {
    const most = Math.max(1, ...levels);
    while (this.levels.children.length > levels.length) this.levels.lastChild.remove();
    while (this.levels.children.length < levels.length) {
      const bar = h("div", { class: "level" }, h("i"), h("span"));
      this.levels.append(bar);
    }
    this.levelsPart.hidden = levels.length === 0;
    levels.forEach((waiting, index) => {
      const bar = this.levels.children[index];
      bar.firstChild.style.height = `${Math.max(waiting ? 8 : 2, (waiting / most) * 100)}%`;
      setText(bar.lastChild, String(index + 1));
      setAttribute(bar, "data-tip", `level ${index + 1}\n${count(waiting)} waiting`);
    });
    setAttribute(this.levels, "aria-label", `Waiting by level: ${levels.join(", ")}`);
    setAttribute(this.levels, "role", "img");
  }

  #showFacts(engine) {
    const facts = [
      ["Calls of this gateway", count(engine.calls)],
      ["Policy", engine.policy ?? DASH],
      ["Preemptions", count(engine.preemptions)],
      ["Recomputed", percent(engine.recomputed)],
      ["Longest step", seconds(engine.longest_step_s)],
      ["Step under way", isNumber(engine.step_age_s) ? seconds(engine.step_age_s) : DASH],
      ["Starts", count(engine.starts)],
      ["Reports lost", count(engine.lost)],
      ["vLLM", engine.vllm ?? DASH],
      ["Async scheduling", engine.async === null ? DASH : engine.async ? "on" : "off"],
    ];
    if (!this.facts.children.length) {
      this.facts.append(...facts.map(([name]) => h("div", {}, h("dt", { text: name }), h("dd"))));
    }
    facts.forEach(([, value], index) => setText(this.facts.children[index].lastChild, value));
  }
}

class Gauge {
  constructor(name, tip) {
    this.value = h("b");
    this.note = h("span", { class: "muted small" });
    this.bar = h("i");
    this.track = h("div", { class: "track", role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": 100 }, this.bar);
    this.element = h("div", { class: "gauge", title: tip },
      h("div", { class: "gauge-head" }, h("span", { class: "gauge-name", text: name }), this.value), this.track, this.note);
  }

  show(share, note, isGood = false) {
    setText(this.value, percent(share));
    setText(this.note, note);
    const size = isNumber(share) ? Math.min(1, Math.max(0, share)) : 0;
    this.bar.style.width = `${size * 100}%`;
    setAttribute(this.track, "aria-valuenow", Math.round(size * 100));
    setAttribute(this.track, "aria-valuetext", `${percent(share)}, ${note}`);
    setAttribute(this.track, "data-heat", isGood || size < 0.8 ? "low" : size < 0.95 ? "mid" : "high");
  }
}
