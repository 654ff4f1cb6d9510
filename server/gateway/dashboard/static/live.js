// The live feed: one event stream, the rows it tells of, and what is known of its state.

const STALLED_MS = 6000;
const RETRY_MS = [400, 800, 1600, 3000, 5000];
const HIDDEN_MS = 60_000; // a page that nobody sees leaves its place to others
const HISTORY = 900;

// Whether this browser may look, and whether there is room; null: the server does not answer.
export async function session() {
  try {
    const answer = await fetch("/dashboard/session", { cache: "no-store" });
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

export class Live extends EventTarget {
  rows = new Map(); // program → row
  column = {}; // name → index
  engines = [];
  samples = [];
  rates = new Map(); // engine → [steps a second]
  fairness = null;
  total = 0;
  behind = 0;
  about = {};
  state = "off"; // off, connecting, filling, live, retrying, full, locked
  boot = null;
  #source = null;
  #offset = 0;
  #tries = 0;
  #retryTimer = 0;
  #watchdog = 0;
  #hiddenTimer = 0;

  constructor() {
    super();
    document.addEventListener("visibilitychange", () => {
      clearTimeout(this.#hiddenTimer);
      if (document.hidden) this.#hiddenTimer = setTimeout(() => this.#close("paused"), HIDDEN_MS);
      else if (this.state === "paused") this.connect();
    });
  }

  // The server's clock, now.
  now() {
    return this.#offset + performance.now() / 1000;
  }

  get(row, name) {
    return row[this.column[name]];
  }

  connect() {
    this.#close("connecting");
    const source = new EventSource("/dashboard/live");
    this.#source = source;
    const on = (name, take) =>
      source.addEventListener(name, (event) => {
        if (this.#source !== source) return;
        this.#feedWatchdog();
        take(JSON.parse(event.data));
      });
    on("hello", (hello) => this.#greet(hello));
    on("rows", (rows) => this.#take(rows));
    on("filled", ({ fairness }) => {
      this.fairness = fairness;
      this.#dropStale();
      this.#enter("live");
      this.#tell("rows");
      this.#tell("tick");
    });
    on("tick", (tick) => this.#tick(tick));
    source.onerror = () => {
      if (this.#source === source) this.#lost();
    };
    this.#feedWatchdog();
  }

  stop(state) {
    this.#close(state);
  }

  #close(state) {
    clearTimeout(this.#retryTimer);
    clearTimeout(this.#watchdog);
    this.#source?.close();
    this.#source = null;
    this.#enter(state);
  }

  #feedWatchdog() {
    clearTimeout(this.#watchdog);
    this.#watchdog = setTimeout(() => this.#lost(), STALLED_MS);
  }

  // Why an event stream ended is not said, so another question is asked.
  async #lost() {
    this.#close("retrying");
    const answer = await session();
    if (this.state !== "retrying") return;
    if (answer && !answer.signed_in) {
      this.#enter("locked");
      return;
    }
    if (answer?.full) this.#enter("full");
    const wait = RETRY_MS[Math.min(this.#tries++, RETRY_MS.length - 1)];
    this.#retryTimer = setTimeout(() => this.connect(), wait * (0.8 + Math.random() * 0.4));
  }

  #greet(hello) {
    this.#tries = 0;
    const restarted = this.boot !== null && this.boot !== hello.boot;
    this.boot = hello.boot;
    this.about = hello;
    this.column = Object.fromEntries(hello.columns.map((name, index) => [name, index]));
    this.#stale = new Set(this.rows.keys());
    if (restarted) {
      this.rows.clear();
      this.#stale.clear();
      this.rates.clear();
    }
    this.#offset = hello.now_s - performance.now() / 1000;
    this.samples = hello.samples;
    this.fairness = hello.fairness;
    this.#takeEngines(hello.engines);
    this.#enter("filling");
    if (restarted) this.#tell("restarted");
    this.#tell("rows");
    this.#tell("tick");
  }

  #stale = new Set();

  // After a reconnect: what the server did not mention again is over.
  #dropStale() {
    for (const id of this.#stale) this.rows.delete(id);
    this.#stale.clear();
  }

  #take(rows) {
    const id = this.column.id;
    for (const row of rows) {
      this.rows.set(row[id], row);
      this.#stale.delete(row[id]);
    }
  }

  #takeEngines(engines) {
    this.engines = engines;
    for (const engine of engines) {
      const history = this.rates.get(engine.engine) ?? [];
      history.push(engine.steps_per_s);
      if (history.length > HISTORY) history.shift();
      this.rates.set(engine.engine, history);
    }
  }

  #tick(tick) {
    this.#offset = tick.now_s - performance.now() / 1000;
    this.samples.push(tick.sample);
    if (this.samples.length > HISTORY) this.samples.shift();
    this.#takeEngines(tick.engines);
    this.total = tick.total;
    this.behind = tick.behind ?? 0;
    if (tick.fairness) this.fairness = tick.fairness;
    if (tick.rows) this.#take(tick.rows);
    for (const id of tick.gone ?? []) this.rows.delete(id);
    this.#tell("tick");
    if (tick.rows?.length || tick.gone?.length) this.#tell("rows");
  }

  #enter(state) {
    if (state === this.state) return;
    this.state = state;
    this.#tell("state");
  }

  #tell(name) {
    this.dispatchEvent(new Event(name));
  }
}
