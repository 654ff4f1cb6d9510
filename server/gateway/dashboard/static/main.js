// Starts the page: who may look, which page, the state of the link, the keys.

import { announce, go, s, setAttribute, setText, startTooltips } from "./dom.js";
import { EnginesPage } from "./engines.js";
import { count } from "./format.js";
import { Live, session } from "./live.js";
import { LoadPage } from "./load.js";
import { ProgramPage } from "./program.js";
import { ProgramsPage } from "./programs.js";

const live = new Live();
const main = document.getElementById("main");
const dialog = document.getElementById("login");
let page = null;
let shownHash = null;

const LINKS = {
  off: "Not connected", connecting: "Connecting", filling: "Loading", live: "Live",
  retrying: "Reconnecting", paused: "Paused", full: "Too many viewers", locked: "Signed out",
};

// Pages.

function pageFor(hash) {
  const [, name = "", id] = hash.split("/");
  if (name === "engines") return { key: "engines", make: () => new EnginesPage(live) };
  if (name === "load") return { key: "load", make: () => new LoadPage(live) };
  if (name === "program" && id) return { key: "programs", make: () => new ProgramPage(live, decode(id)) };
  return { key: "programs", make: () => new ProgramsPage(live) };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function route() {
  if (location.hash === shownHash) return; // told once by go() and once by the browser
  shownHash = location.hash;
  const { key, make } = pageFor(location.hash);
  page?.stop();
  page = make();
  for (const link of document.querySelectorAll(".tabs a")) {
    if (link.dataset.page === key) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.replaceChildren(page.element);
  document.title = `${page.title} · autellix`;
  page.start();
  announce(page.title);
}

// The link to the server.

function showLink() {
  const element = document.getElementById("link");
  setAttribute(element, "data-state", live.state);
  setText(document.getElementById("link-text"), LINKS[live.state] ?? live.state);
  const banner = document.getElementById("banner");
  const words = {
    retrying: "The server does not answer. What you see is how it was; trying again.",
    full: "As many viewers watch as this server allows. Trying again.",
    paused: "Paused while the page was out of sight.",
  }[live.state];
  banner.hidden = !words;
  if (words) {
    setText(banner, words);
    banner.dataset.kind = "warn";
  }
  document.body.classList.toggle("stale", !["live", "filling", "connecting"].includes(live.state));
  document.getElementById("logout").hidden = live.state === "locked";
  if (live.state === "locked" && !dialog.open) dialog.showModal();
}

let bannerTimer = 0;
function restarted() {
  const banner = document.getElementById("banner");
  banner.hidden = false;
  banner.dataset.kind = "info";
  setText(banner, "The server was started again. Programs from before are those in its journal.");
  clearTimeout(bannerTimer);
  bannerTimer = setTimeout(() => {
    if (banner.dataset.kind === "info") banner.hidden = true;
  }, 12_000);
}

live.addEventListener("state", () => {
  if (!(live.state === "filling" || live.state === "live") ||
      document.getElementById("banner").dataset.kind !== "info") showLink();
  else {
    setAttribute(document.getElementById("link"), "data-state", live.state);
    setText(document.getElementById("link-text"), LINKS[live.state]);
    document.body.classList.remove("stale");
  }
  if (live.state === "live") announce(`Live, ${count(live.rows.size)} programs`);
  page?.onRows();
});
live.addEventListener("rows", () => page?.onRows());
live.addEventListener("tick", () => page?.onTick());
live.addEventListener("restarted", restarted);

// Signing in and out.

document.getElementById("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = document.getElementById("key");
  const error = document.getElementById("login-error");
  setText(error, "");
  let status = 0;
  try {
    const answer = await fetch("/dashboard/login", {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ key: field.value }),
    });
    status = answer.status;
  } catch {
    status = 0;
  }
  if (status === 204) {
    field.value = "";
    dialog.close();
    live.connect();
    return;
  }
  setText(error, { 401: "This is not an admin key of this server.", 429: "Too many wrong keys. Wait a minute.",
    0: "The server does not answer." }[status] ?? `The server answered ${status}.`);
  field.select();
});

dialog.addEventListener("cancel", (event) => event.preventDefault()); // there is nothing behind it

document.getElementById("logout").addEventListener("click", async () => {
  live.stop("locked");
  live.rows.clear();
  try {
    await fetch("/dashboard/logout", { method: "POST" });
  } finally {
    location.reload();
  }
});

// Light, dark, or as the system.

const THEMES = ["system", "light", "dark"];
const THEME_NAMES = { system: "as the system", light: "light", dark: "dark" };
const PATHS = {
  system: ["M3 5h18v11H3z", "M9 20h6", "M12 16v4"],
  light: ["M12 8a4 4 0 1 0 0 8a4 4 0 0 0 0-8", "M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.5 1.5M17.5 17.5L19 19M5 19l1.5-1.5M17.5 6.5L19 5"],
  dark: ["M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z"],
};

function readTheme() {
  try {
    const kept = localStorage.getItem("autellix-theme");
    return THEMES.includes(kept) ? kept : "system";
  } catch {
    return "system"; // storage may be forbidden
  }
}

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("autellix-theme", theme);
  } catch {
    // it lasts as long as the page then
  }
  const button = document.getElementById("theme");
  setAttribute(button, "aria-label", `Theme: ${THEME_NAMES[theme]}`);
  setAttribute(button, "title", `Theme: ${THEME_NAMES[theme]} (t)`);
  button.replaceChildren(s("svg", { viewBox: "0 0 24 24", "aria-hidden": "true", class: "icon" },
    PATHS[theme].map((d) => s("path", { d }))));
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(readTheme()) + 1) % THEMES.length];
  setTheme(theme);
  announce(`Theme: ${THEME_NAMES[theme]}`);
}

document.getElementById("theme").addEventListener("click", nextTheme);

// Keys.

const keys = document.getElementById("keys");
document.getElementById("help").addEventListener("click", () => keys.showModal());

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || dialog.open || keys.open) return;
  if (event.target.matches("input, select, textarea")) return;
  const hashes = { p: "#/", e: "#/engines", q: "#/load" };
  if (event.key === "/") {
    event.preventDefault();
    if (!page.focusFilter) go("#/");
    page.focusFilter();
  } else if (Object.hasOwn(hashes, event.key)) go(hashes[event.key]);
  else if (event.key === "t") nextTheme();
  else if (event.key === "?") keys.showModal();
  else if (event.key === "Escape") page.onEscape?.();
});

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  (main.querySelector("[tabindex='0'], a, button, input") ?? main).focus();
});

window.addEventListener("hashchange", route);
setTheme(readTheme());
startTooltips();
route();
const first = await session();
if (first && !first.signed_in) live.stop("locked");
else live.connect();
