// One program: its figures, its graph, what its calls did and when.

import { announce, go, h, setAttribute, setText } from "./dom.js";
import { ago, count, DASH, isNumber, percent, PHASES, REASONS, seconds, several, slowdown, STATES } from "./format.js";
import { drawDag, keyOf, nameOf, statusOf, threadList } from "./dag.js";
import { Timeline } from "./timeline.js";

const ROWS_MAX = 200;
const ASK_MS = 900;
const ASK_MS_A_CALL = 8; // a long program costs the server more, so it is asked for less often

export class ProgramPage {
  constructor(live, id) {
    this.live = live;
    this.id = id;
    this.title = "Program";
    this.asked = 0;
    this.heading = h("h1", { text: id });
    this.pill = h("span", { class: "pill" });
    this.sub = h("p", { class: "muted small mono sub-line" });
    this.figures = h("div", { class: "tiles" });
    this.facts = h("dl", { class: "facts wide-facts" });
    this.graph = h("div", { class: "dag-scroll", tabindex: "0", role: "group", "aria-label": "Graph, scrollable" });
    this.timeline = new Timeline((call) => this.#pick(call));
    this.calls = h("div", { class: "table-scroll", tabindex: "0", role: "group", "aria-label": "Calls, scrollable" });
    this.body = h("div", { class: "program-body" },
      this.figures,
      section("Graph", "Which call came after which. Curves are forks and joins of threads.", this.graph),
      section("Timeline", null, this.timeline.element),
      section("Calls", null, this.calls),
      section("More", null, this.facts));
    this.empty = h("div", { class: "empty" }, h("h2", { text: "Loading" }));
    this.body.hidden = true;
    this.element = h("div", { class: "page program" },
      h("a", { class: "back", href: "#/", text: "← Programs" }),
      h("div", { class: "title-row" }, this.heading, this.pill), this.sub, this.empty, this.body);
  }

  start() {
    this.#ask();
  }

  stop() {
    this.over = true;
    clearTimeout(this.timer);
    this.timeline.resizes.disconnect();
  }

  onEscape() {
    go("#/");
  }

  onRows() {
    const row = this.live.rows.get(this.id);
    if (row !== this.row) {
      this.row = row;
      this.#askSoon();
    }
  }

  onTick() {
    if (this.known?.row.in_flight) this.#askSoon();
    else if (this.known) this.#showAges();
  }

  #askSoon() {
    if (this.timer) return;
    const pause = Math.max(ASK_MS, ASK_MS_A_CALL * (this.known?.calls.length ?? 0));
    const wait = Math.max(0, this.asked + pause - performance.now());
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.#ask();
    }, wait);
  }

  async #ask() {
    if (this.isAsking || ["locked", "retrying"].includes(this.live.state)) return;
    this.isAsking = true;
    this.asked = performance.now();
    try {
      const answer = await fetch(`/dashboard/programs/${encodeURIComponent(this.id)}`, { cache: "no-store" });
      if (this.over) return;
      if (answer.ok) this.#show(await answer.json());
      else if (answer.status === 404) this.#gone();
    } catch {
      // the link's state says that the server does not answer
    } finally {
      this.isAsking = false;
    }
  }

  #gone() {
    if (this.known) {
      setText(this.pill, "Forgotten");
      setAttribute(this.pill, "data-state", "expired");
      return;
    }
    this.empty.replaceChildren(h("h2", { text: "No such program" }),
      h("p", { text: "It is not in the table: it never was, or it ended a while ago and has been forgotten." }),
      h("a", { href: "#/", text: "All programs" }));
  }

  #show(known) {
    const { row, program, calls } = known;
    this.known = known;
    if (this.id !== row.id) {
      this.id = row.id;
      history.replaceState(null, "", `#/program/${row.id}`);
    }
    this.empty.hidden = true;
    this.body.hidden = false;
    if (this.title !== row.name) {
      this.title = row.name;
      document.title = `${row.name} · autellix`;
      announce(`Program ${row.name}`);
    }
    setText(this.heading, row.name);
    setText(this.pill, STATES[row.state]?.label ?? row.state);
    setAttribute(this.pill, "data-state", row.state);
    setAttribute(this.pill, "title", STATES[row.state]?.tip ?? "");
    setText(this.sub, [row.framework, row.id, program.session && program.session !== row.name && `session ${program.session}`]
      .filter(Boolean).join("  ·  "));
    this.#showAges();
    this.#showFacts(program);
    const dag = drawDag(calls, (call) => this.#pick(call));
    const top = this.graph.scrollLeft;
    this.graph.replaceChildren(dag ?? noCalls(program));
    this.graph.scrollLeft = top;
    this.timeline.element.hidden = !calls.length;
    this.timeline.show(calls, known.now_s, row.end_s === null);
    this.#showCalls(calls, program);
    if (this.picked) this.#mark();
  }

  #showAges() {
    const { row, program, calls } = this.known;
    const end = row.end_s ?? this.live.now();
    const wall = program.calls_by_wall_time;
    this.#figure(0, "Response", seconds(Math.max(program.response_s, end - row.arrival_s)), row.end_s === null ? "since its arrival" : "arrival to last answer");
    this.#figure(1, "Service", `${wall ? "~" : ""}${seconds(row.service_s)}`, wall ? `${several(wall, "call")} by wall time` : "model execution");
    this.#figure(2, "Wait", row.slowdown === null ? DASH : seconds(row.wait_s), row.slowdown === null ? "not told by the engine" : "runnable, not running");
    this.#figure(3, "Slowdown", slowdown(row.slowdown), "(service + wait) ÷ service");
    this.#figure(4, "Calls", count(row.calls), `${count(row.in_flight)} in flight, ${several(row.threads, "thread")}`);
    this.#figure(5, "Level", row.level === null ? DASH : String(row.level), `${several(row.preemptions, "preemption")}, ${several(row.swaps, "swap")}`);
    this.calls.dataset.known = calls.length;
  }

  #figure(index, label, value, note) {
    let tile = this.figures.children[index];
    if (!tile) {
      tile = h("div", { class: "tile" }, h("div", { class: "tile-label" }), h("div", { class: "tile-value" }),
        h("div", { class: "tile-note muted" }));
      this.figures.append(tile);
    }
    setText(tile.children[0], label);
    setText(tile.children[1], value);
    setText(tile.children[2], note);
  }

  #showFacts(program) {
    const hits = program.prompt_tokens ? program.hit_tokens / program.prompt_tokens : null;
    const facts = [
      ["Arrived", ago(program.age_s)],
      ["Ended because", program.reason ?? DASH],
      ["Prompt tokens", count(program.prompt_tokens)],
      ["Found in the cache", percent(hits)],
      ["Tokens generated", count(program.output_tokens)],
      ["Engines", Object.entries(program.engines).map(([name, calls]) => `${name} (${calls})`).join(", ") || DASH],
      ["Calls by level", Object.entries(program.levels).map(([level, calls]) => `${level}: ${calls}`).join(", ") || DASH],
      ["Retried, late", `${count(program.calls_retried)}, ${count(program.calls_late)}`],
      ["Tools running", program.tools_running.join(", ") || DASH],
      ["Tools run", count(program.tools)],
      ["Conversation", program.conversation ?? DASH],
      ["Parent session", program.parent_session ?? DASH],
    ];
    if (!this.facts.children.length) {
      this.facts.append(...facts.map(([name]) => h("div", {}, h("dt", { text: name }), h("dd"))));
    }
    facts.forEach(([, value], index) => setText(this.facts.children[index].lastChild, value));
  }

  #showCalls(calls, program) {
    const shown = calls.slice(-ROWS_MAX).reverse();
    if (!shown.length) {
      this.calls.replaceChildren(noCalls(program));
      return;
    }
    const begin = calls[0].begun_s;
    const heads = ["Call", "Node", "State", "Engine", "Level", "Began", "Took", "Service", "Wait", "Preempted", "Tokens", "Why there"];
    const number = new Set(["Level", "Began", "Took", "Service", "Wait", "Preempted", "Tokens"]);
    const caption = calls.length > ROWS_MAX ? `The latest ${ROWS_MAX} of ${count(calls.length)} calls on this page`
      : `${several(calls.length, "remembered call")} of ${count(program.calls)}, the latest first`;
    this.calls.replaceChildren(h("table", { class: "calls" }, h("caption", { class: "muted small", text: caption }),
      h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col", text: name, class: number.has(name) ? "number" : null })))),
      h("tbody", {}, shown.map((call) => this.#callRow(call, begin)))));
  }

  #callRow(call, begin) {
    const status = statusOf(call);
    const now = call.intervals.at(-1)?.state;
    const state = status === "running" ? PHASES[now]?.short ?? "running" : status === "done" ? "done" : call.outcome ?? "failed";
    const cell = (text, isNumberCell) => h("td", { text, class: isNumberCell ? "number" : null });
    const preempted = isNumber(call.preemptions) ? `${call.preemptions}${call.swaps ? `, ${call.swaps} swapped` : ""}` : DASH;
    return h("tr", { "data-call": keyOf(call.thread, call.seq) },
      h("th", { scope: "row", text: `${call.thread} · ${call.seq}${call.attempt ? ` (try ${call.attempt + 1})` : ""}`, title: nameOf(call) }),
      cell(call.node ?? DASH), h("td", {}, h("span", { class: "pill", "data-state": status, text: state })),
      cell(call.engine ?? DASH), cell(isNumber(call.level) ? String(call.level) : DASH, true),
      cell(`+${seconds(call.begun_s - begin)}`, true), cell(seconds(call.took_s), true),
      cell(seconds(call.service_s), true), cell(seconds(call.wait_s), true), cell(preempted, true),
      h("td", { class: "number", text: isNumber(call.output_tokens) ? `${count(call.prompt_tokens)} → ${count(call.output_tokens)}` : DASH,
        title: isNumber(call.hit_tokens) ? `${count(call.hit_tokens)} of the prompt found in the cache` : null }),
      h("td", { class: "why", text: REASONS[call.choices.at(-1)?.why] ?? call.choices.at(-1)?.why ?? DASH }));
  }

  #pick(call) {
    this.picked = keyOf(call.thread, call.seq);
    this.#mark();
    const row = this.calls.querySelector(`tr[data-call="${this.picked}"]`);
    row?.scrollIntoView({ block: "nearest", behavior: "smooth" });
    announce(`${nameOf(call)}, ${seconds(call.took_s)}`);
  }

  #mark() {
    for (const element of this.element.querySelectorAll("[data-call]")) {
      element.classList.toggle("picked", element.dataset.call === this.picked);
    }
  }
}

function section(title, note, content) {
  return h("section", { class: "card", "aria-label": title }, h("h2", { text: title }),
    note && h("p", { class: "muted small", text: note }), content);
}

function noCalls(program) {
  return h("div", { class: "empty small-empty" },
    h("p", { text: program.calls ? "Its calls are no longer remembered: the server keeps the latest ones of all programs."
      : "It has made no call yet." }),
    program.threads.length ? threadList(program.threads) : null);
}
