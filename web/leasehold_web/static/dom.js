// Elements, and how the page asks its server.

// Bidirectional marks, which change the order of displayed text. Names, reasons and labels come from any user. The same
// characters are escaped by the command line, and by the tables without JavaScript.
const DIRECTIONS = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const SHOWN = new Set(["title", "aria-label"]); // attributes that are read as text

export function safe(text) {
  return String(text).replace(DIRECTIONS, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

// Makes an element. Text is never parsed as HTML. A property that begins with "on" is a listener.
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : SHOWN.has(name) ? safe(value) : value);
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(3)) {
    if (child === undefined || child === null || child === false || child === "") continue;
    element.append(typeof child === "string" ? safe(child) : child);
  }
}

// Draws the content of an element anew. The focus stays on the part with the same purpose.
export function replace(element, ...children) {
  const focused = element !== document.activeElement && element.contains(document.activeElement) ? document.activeElement : null;
  const find = focused && finder(element, focused);
  element.replaceChildren();
  append(element, children);
  find?.()?.focus({ preventScroll: true });
}

const PLACES = ".events, .scroll, details, details > .output";

// Lists, tables and details of an element, by what they are.
function placesOf(element) {
  return new Map([...element.querySelectorAll(PLACES)].map((one) => [`${one.localName} ${one.getAttribute("aria-label") ?? ""}`, one]));
}

// Draws anew like replace. Lists and tables inside stay scrolled, and details stay open.
export function redraw(element, ...children) {
  const before = [...placesOf(element)].map(([key, { open, scrollTop, scrollLeft }]) => [key, { open, scrollTop, scrollLeft }]);
  replace(element, ...children);
  const places = placesOf(element);
  for (const [key, place] of before) Object.assign(places.get(key) ?? {}, place);
}

// Shows an error alone in an element. An alert with the same text stays: a screen reader reads each new one.
export function showProblem(element, text) {
  if (element.firstElementChild?.getAttribute("role") !== "alert") replace(element, h("p", { class: "box bad", role: "alert" }));
  setText(element.firstChild, text);
}

// Keeps the part that has the focus. Returns how to give the focus back: to this part, to the one with the same purpose
// if the part was drawn anew, or else to the drawer or the view.
export function keepFocus() {
  const before = document.activeElement;
  const find = before === document.body ? () => null : finder(document, before);
  return () => {
    const part = before.isConnected && before !== document.body ? before : find();
    (part ?? document.querySelector(".drawer .close") ?? document.getElementById("main")).focus({ preventScroll: true });
  };
}

// Returns how to find a part of a root again after a change. Among parts of equal purpose, such as two links to one
// workload, it is the one at the same place as before, or the last one if there are fewer.
function finder(root, part) {
  const alike = () => [...root.querySelectorAll(part.localName)].filter((one) => purpose(one) === purpose(part));
  const place = alike().indexOf(part);
  return () => {
    const found = alike();
    return found[place] ?? found.at(-1);
  };
}

// What a part is for, which stays the same when it is drawn anew. An id around the part ("data-of") tells equal buttons
// of several entries apart.
export function purpose(element) {
  const of = element.closest("[data-of]")?.dataset.of ?? "";
  return `${of}\n${element.dataset.uuid ?? element.getAttribute("href") ?? element.getAttribute("aria-label") ?? element.textContent}`;
}

// Sets the text of an element. A status with the same text stays as it is: a screen reader reads each change.
export function setText(element, text) {
  if (element.textContent !== safe(text)) element.textContent = safe(text);
}

export function announce(text) {
  document.getElementById("announcer").textContent = safe(text);
}

// An answer that is no success, with the words of the API.
export class Refusal extends Error {
  constructor(status, body) {
    super(body.message || `the server answered ${status}`);
    this.status = status;
    this.reason = body.reason || "";
  }

  // Whether the same question may have an answer soon.
  get isTransient() {
    return this.status === 0 || this.status === 429 || this.status >= 502;
  }
}

// A browser keeps a request for itself while all of its connections to a server are in use, so each has a limit.
const ANSWER_MS = 65000; // longer than the server's own limit
const LATE = "no answer from the server in time: if many windows of this page are open, close some";

export async function ask(path, { body, signal } = {}) {
  const limit = new AbortController();
  const end = () => limit.abort(signal.reason);
  if (signal?.aborted) end();
  signal?.addEventListener("abort", end);
  const timer = setTimeout(() => limit.abort(new DOMException("", "TimeoutError")), ANSWER_MS);
  const options = { signal: limit.signal, headers: { Accept: "application/json" }, credentials: "same-origin" };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
    options.headers["Leasehold-Page"] = "1";
  }
  let answer;
  let found;
  try {
    answer = await fetch(path, options);
    found = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.name !== "SyntaxError") throw new Refusal(0, { message: error.name === "TimeoutError" ? LATE : "the server does not answer: it may be starting again" });
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", end);
  }
  found ??= {}; // no JSON, as from a proxy
  if (answer.ok) return found;
  if (answer.status === 401) location.assign(`/login?ended&next=${encodeURIComponent(location.pathname + location.search)}`);
  throw new Refusal(answer.status, found);
}

export function requestId() {
  return crypto.randomUUID ? crypto.randomUUID() : [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");
}

// An icon, as an SVG element from drawn parts.
export function svg(viewBox, parts, properties = {}) {
  const space = "http://www.w3.org/2000/svg";
  const element = document.createElementNS(space, "svg");
  element.setAttribute("viewBox", viewBox);
  element.setAttribute("aria-hidden", "true");
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  for (const [tag, attributes] of parts) {
    const part = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes)) part.setAttribute(name, value);
    element.append(part);
  }
  return element;
}
