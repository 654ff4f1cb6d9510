// Numbers and times as people read them.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

export const DASH = "–";
export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (isNumber(value) ? whole.format(value) : DASH);
export const compact = (value) => (isNumber(value) ? short.format(value) : DASH);
export const several = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;
export const percent = (share) => (isNumber(share) ? `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %` : DASH);

export function seconds(value) {
  if (!isNumber(value)) return DASH;
  const size = Math.abs(value);
  if (size < 0.0005) return "0 s";
  if (size < 1) return `${(value * 1000).toFixed(0)} ms`;
  if (size < 10) return `${value.toFixed(2)} s`;
  if (size < 100) return `${value.toFixed(1)} s`;
  if (size < 3600) return `${Math.floor(value / 60)} m ${String(Math.floor(value % 60)).padStart(2, "0")} s`;
  return `${Math.floor(value / 3600)} h ${String(Math.floor((value % 3600) / 60)).padStart(2, "0")} m`;
}

export function ago(value) {
  if (!isNumber(value)) return DASH;
  if (value < 1.5) return "now";
  if (value < 60) return `${Math.floor(value)} s ago`;
  if (value < 3600) return `${Math.floor(value / 60)} min ago`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ago`;
  return `${Math.floor(value / 86400)} d ago`;
}

export function slowdown(value) {
  if (!isNumber(value)) return DASH;
  return `${value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : whole.format(value)}×`;
}

export const STATES = {
  active: { label: "Active", tip: "a call is in flight" },
  tool_wait: { label: "Tool wait", tip: "between two calls: a tool runs, or the next call is expected" },
  idle: { label: "Idle", tip: "open, and silent for a while" },
  draining: { label: "Draining", tip: "ended by its owner, with calls still in flight" },
  ended: { label: "Ended", tip: "over" },
  expired: { label: "Expired", tip: "its lease ran out: nobody ended it" },
};

// What a call does, in the words of its record.
export const PHASES = {
  gateway: { label: "in the gateway", short: "gateway" },
  queued: { label: "queued", short: "queued" },
  running: { label: "running", short: "running" },
  preempted: { label: "preempted, to be computed again", short: "preempted" },
  swapped: { label: "preempted, its blocks in host memory", short: "swapped" },
  engine: { label: "in the engine, which tells no more", short: "in the engine" },
  answering: { label: "answer on its way", short: "answering" },
  tool: { label: "tool wait", short: "tool wait" },
};

// Why a call went to the engine it went to.
export const REASONS = {
  first: "the program's first call: chosen by load",
  home: "the program's own engine",
  moved: "moved away from the program's engine",
  next: "the engine before it did not take the call",
  holder: "holds the response that the call goes on",
};
