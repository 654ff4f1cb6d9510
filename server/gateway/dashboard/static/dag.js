// A program's calls as a graph: one column a step of the longest way there, one lane a thread.

import { h, s } from "./dom.js";
import { isNumber, seconds } from "./format.js";

const NODE = { width: 84, height: 30 };
const GAP = { x: 34, y: 16 };
const PAD = 14;
const CALLS_MAX = 1500;

export const keyOf = (thread, seq) => `${thread}:${seq}`;

// The latest attempt of each call, oldest call first.
export function latestAttempts(calls) {
  const found = new Map();
  for (const call of calls) found.set(keyOf(call.thread, call.seq), call);
  return [...found.values()];
}

// Lanes for stretches [{id, first, last}]: one that is over lends its lane to a later one.
export function lanesOf(stretches) {
  const lanes = new Map();
  const until = [];
  for (const { id, first, last } of [...stretches].sort((a, b) => a.first - b.first || a.id - b.id)) {
    let lane = until.findIndex((end) => end < first);
    if (lane < 0) lane = until.push(last) - 1;
    until[lane] = last;
    lanes.set(id, lane);
  }
  return { lanes, count: until.length };
}

function place(calls) {
  const depth = new Map();
  const threads = new Map();
  for (const call of calls) {
    const parents = call.parents.map(([thread, seq]) => depth.get(keyOf(thread, seq))).filter(isNumber);
    const here = parents.length ? Math.max(...parents) + 1 : 0;
    depth.set(keyOf(call.thread, call.seq), here);
    const stretch = threads.get(call.thread) ?? { id: call.thread, first: here, last: here };
    stretch.first = Math.min(stretch.first, here);
    stretch.last = Math.max(stretch.last, here);
    threads.set(call.thread, stretch);
  }
  const main = threads.get(0);
  if (main) Object.assign(main, { first: -1, last: Infinity }); // the main thread keeps its lane
  return { depth, ...lanesOf([...threads.values()]) };
}

export function statusOf(call) {
  if (call.ended_s === null) return "running";
  return call.status && call.status < 400 ? "done" : "failed";
}

export const nameOf = (call) => `thread ${call.thread}, call ${call.seq}`;

export function drawDag(all, pick) {
  const calls = latestAttempts(all).slice(-CALLS_MAX);
  if (!calls.length) return null;
  const { depth, lanes, count } = place(calls);
  const x = (call) => PAD + depth.get(keyOf(call.thread, call.seq)) * (NODE.width + GAP.x);
  const y = (call) => PAD + lanes.get(call.thread) * (NODE.height + GAP.y);
  const known = new Map(calls.map((call) => [keyOf(call.thread, call.seq), call]));
  const edges = [];
  const nodes = [];
  let joins = 0;
  for (const call of calls) {
    const parents = call.parents.map(([thread, seq]) => known.get(keyOf(thread, seq))).filter(Boolean);
    joins += parents.length > 1;
    for (const parent of parents) {
      const [x1, y1] = [x(parent) + NODE.width, y(parent) + NODE.height / 2];
      const [x2, y2] = [x(call), y(call) + NODE.height / 2];
      const bend = Math.min(40, (x2 - x1) / 2);
      const kind = parent.thread === call.thread ? "same" : parents.length > 1 ? "join" : "fork";
      edges.push(s("path", { class: `edge ${kind}`,
        d: y1 === y2 ? `M${x1},${y1}H${x2}` : `M${x1},${y1}C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}` }));
    }
    nodes.push(node(call, x(call), y(call), pick));
  }
  const deepest = Math.max(...depth.values());
  const width = PAD * 2 + (deepest + 1) * (NODE.width + GAP.x) - GAP.x;
  const height = PAD * 2 + count * (NODE.height + GAP.y) - GAP.y;
  const label = `Graph of ${calls.length} calls in ${lanes.size} threads, ${deepest + 1} steps deep, ${joins} joins. ` +
    "The table of calls below says the same in words.";
  return s("svg", { class: "dag", role: "img", "aria-label": label, width, height,
    viewBox: `0 0 ${width} ${height}` }, edges, nodes);
}

function node(call, x, y, pick) {
  const label = call.node ?? `${call.thread} · ${call.seq}`;
  const text = label.length > 11 ? `${label.slice(0, 10)}…` : label;
  return s("g", {
    class: "node", "data-status": statusOf(call), "data-call": keyOf(call.thread, call.seq),
    transform: `translate(${x},${y})`, onclick: () => pick(call),
    "data-tip": [nameOf(call), call.node, call.engine && `engine ${call.engine}`,
      `${seconds(call.took_s)}${call.ended_s === null ? " so far" : ""}`,
      isNumber(call.wait_s) && `waited ${seconds(call.wait_s)}`].filter(Boolean).join("\n"),
  },
  s("rect", { width: NODE.width, height: NODE.height, rx: 7 }),
  s("rect", { class: "mark", x: 0, y: 7, width: 3, height: NODE.height - 14, rx: 1.5 }),
  s("text", { x: NODE.width / 2, y: NODE.height / 2 + 4, "text-anchor": "middle", text }));
}

// Where no call is remembered: the threads and where they came from.
export function threadList(threads) {
  return h("ul", { class: "thread-list" }, threads.map((thread) =>
    h("li", { text: `Thread ${thread.thread}: ${thread.calls} calls` +
      (thread.parent ? `, forked from thread ${thread.parent[0]} after ${thread.parent[1]} calls` : "") })));
}
