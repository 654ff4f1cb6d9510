// What is typed into the filter: words that all must occur, and conditions on fields.

const CONDITION = /^([a-z_]+)(:|<=|>=|<|>|=)(.+)$/i;
const FIELDS = {
  state: "state", engine: "engine", framework: "framework", name: "name", id: "id",
  level: "level", calls: "calls", service: "service_s", wait: "wait_s", slowdown: "slowdown",
  threads: "threads", tokens: "tokens", preemptions: "preemptions", swaps: "swaps",
};

const COMPARE = {
  "<": (a, b) => a < b,
  ">": (a, b) => a > b,
  "<=": (a, b) => a <= b,
  ">=": (a, b) => a >= b,
  "=": (a, b) => a === b,
};

// Returns a function of a row, given the index of each column.
export function makeFilter(text, column) {
  const tests = text.trim().toLowerCase().split(/\s+/).filter(Boolean).map((word) => testOf(word, column));
  return (row) => tests.every((test) => test(row));
}

function testOf(word, column) {
  const match = CONDITION.exec(word);
  const field = match && FIELDS[match[1]];
  if (field) {
    const index = column[field];
    const [, , operator, wanted] = match;
    const number = Number(wanted);
    if (operator === ":" || Number.isNaN(number)) {
      return (row) => String(row[index] ?? "").toLowerCase().includes(wanted);
    }
    return (row) => row[index] !== null && COMPARE[operator](Number(row[index]), number);
  }
  const { name, framework, id, engine } = column;
  return (row) =>
    row[name].toLowerCase().includes(word) ||
    (row[framework] ?? "").toLowerCase().includes(word) ||
    row[id].includes(word) ||
    (row[engine] ?? "").toLowerCase().includes(word);
}

const OPEN = new Set(["active", "tool_wait", "idle", "draining"]);

export const GROUPS = {
  all: { label: "All", has: () => true },
  open: { label: "Open", has: (state) => OPEN.has(state) },
  active: { label: "Active", has: (state) => state === "active" || state === "draining" },
  tool_wait: { label: "Tool wait", has: (state) => state === "tool_wait" },
  idle: { label: "Idle", has: (state) => state === "idle" },
  over: { label: "Over", has: (state) => !OPEN.has(state) },
};

const texts = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

// Returns a comparison of rows; unknown values come last in either direction.
export function makeOrder({ key, down }, column) {
  const index = column[key];
  const last = column.last_s;
  const sign = down ? -1 : 1;
  const recent = (a, b) => b[column.in_flight] - a[column.in_flight] || b[last] - a[last];
  if (key === "last_s") {
    const running = column.in_flight;
    return (a, b) => sign * ((a[running] > 0) - (b[running] > 0) || a[last] - b[last]);
  }
  return (a, b) => {
    const x = a[index];
    const y = b[index];
    if (x === y) return recent(a, b);
    if (x === null) return 1;
    if (y === null) return -1;
    const order = typeof x === "string" ? texts.compare(x, y) : x - y;
    return sign * order || recent(a, b);
  };
}
