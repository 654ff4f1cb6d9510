// Elements are made by name and text only, never from markup: whatever a program calls itself, it
// stays text.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

export const h = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);

export const s = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// Write a text only if it differs: most cells do not change from one second to the next.
export function setText(element, text) {
  if (element.firstChild?.nodeType === Node.TEXT_NODE && !element.firstChild.nextSibling) {
    if (element.firstChild.data !== text) element.firstChild.data = text;
  } else if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  const text = String(value);
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

// Go to a page now. The browser tells of a new hash only later, and the keys typed until then would
// still go to the page before.
export function go(hash) {
  location.hash = hash;
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

let announceTimer = 0;
export function announce(text) {
  clearTimeout(announceTimer); // typing in the filter: only the last count is spoken
  announceTimer = setTimeout(() => setText(document.getElementById("announcer"), text), 400);
}

// One tooltip for all: what it says is in the element's data-tip, one line a line.
export function startTooltips() {
  const box = document.getElementById("tooltip");
  let owner = null;
  function show(target, x, y) {
    owner = target;
    box.replaceChildren(...target.dataset.tip.split("\n").map((line) => h("div", { text: line })));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = Math.max(8, Math.min(x + 14, innerWidth - width - 8));
    const below = y + 16 + height < innerHeight;
    box.style.left = `${left}px`;
    box.style.top = `${below ? y + 16 : Math.max(8, y - height - 12)}px`;
  }
  function hide() {
    owner = null;
    box.hidden = true;
  }
  document.addEventListener("pointermove", (event) => {
    const target = event.target.closest?.("[data-tip]");
    if (target) show(target, event.clientX, event.clientY);
    else if (owner) hide();
  });
  document.addEventListener("focusin", (event) => {
    if (!event.target.matches?.("[data-tip]")) return;
    const { left, bottom } = event.target.getBoundingClientRect();
    show(event.target, left, bottom - 8);
  });
  for (const name of ["focusout", "scroll", "pointerdown", "pointerleave"]) {
    document.addEventListener(name, hide, true);
  }
}
