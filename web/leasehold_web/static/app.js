// The frame of the page: views by path, the caller, and whether there is contact.
import "/static/clicks.js";
import { append, ask, h, replace, safe, setText } from "/static/dom.js";
import { connect, live, onChange } from "/static/live.js";
import { lower, when } from "/static/words.js";

const VIEWS = [
  [/^\/$/, "Fleet", "/static/fleet.js"],
  [/^\/timeline$/, "Timeline", "/static/timeline.js"],
  [/^\/workloads$/, "Workloads", "/static/workloads.js"],
  [/^\/workloads\/([^/]+)$/, "Workload", "/static/workload.js"],
  [/^\/commands$/, "Commands", "/static/commands.js"],
  [/^\/commands\/([^/]+)$/, "Command", "/static/commands.js"],
  [/^\/workers\/([^/]+)$/, "Host", "/static/worker.js"],
];
const RELOAD_MS = 2000; // until a view that can't be loaded is tried again
const RELOADED = "leasehold-reloaded "; // with a path: in the session's storage after a reload, until its view loads
const BEGIN_MS = 2000; // until the session is asked for again
const main = document.getElementById("main");
const contact = document.getElementById("contact");
let leave = null;
let drawing = 0;

export function go(path) {
  history.pushState(null, "", path);
  return draw(true);
}

async function draw(isMove) {
  const mine = ++drawing;
  const path = location.pathname;
  const found = VIEWS.find(([pattern]) => pattern.test(path));
  if (!found) return;
  const [pattern, title, module] = found;
  const argument = pattern.exec(path)[1];
  let view = null;
  try {
    view = await import(module);
    sessionStorage.removeItem(RELOADED + path);
  } catch {
    // Browsers differ in whether they load a module again that failed. A new page does so in all of them.
    reloadOnContact(mine, path, title);
  }
  if (mine !== drawing) return;
  leave?.();
  leave = null;
  replace(main);
  document.title = `${title} · Leasehold`;
  const section = path === "/" || path.startsWith("/workers") ? "/" : `/${path.split("/")[1]}`;
  for (const link of document.querySelectorAll("#views a")) {
    if (link.getAttribute("href") === section) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (view) leave = view.show(main, argument && decoded(argument)) ?? null;
  else tell(`The server does not answer, so this view (${title}) can't be shown. It appears once the server answers.`);
  if (isMove) main.focus({ preventScroll: true });
}

function tell(text) {
  replace(main, h("div", { class: "page" }, h("p", { class: "box bad", role: "alert" }, text)));
}

// Reloads once for each path: a script may fail although the server answers.
function reloadOnContact(mine, path, title) {
  setTimeout(async () => {
    // A reload without an answer leads to the browser's own error page.
    const isAnswered = live.isConnected && (await ask("/api/session").then(() => true, () => false));
    if (mine !== drawing) return;
    if (!isAnswered) reloadOnContact(mine, path, title);
    else if (sessionStorage.getItem(RELOADED + path)) tell(`The server answers, but this view (${title}) can't be shown: its script fails to load. Load the page again. If that does not help, ask the operator of the server.`);
    else {
      sessionStorage.setItem(RELOADED + path, "yes");
      location.reload();
    }
  }, RELOAD_MS);
}

// A malformed escape stays as it is: the server then refuses the name.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='/']");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  if (!VIEWS.some(([pattern]) => pattern.test(link.pathname))) return;
  event.preventDefault();
  go(link.getAttribute("href"));
});
window.addEventListener("popstate", () => draw(true));
// A fragment in the address would draw the view anew.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});

function showContact() {
  const { identity, role, on_behalf_of: user } = live.session;
  const who = document.getElementById("who");
  replace(who);
  append(who, [h("b", {}, user ? `${identity} for ${user}` : identity), ` · ${role ? lower(role) : "no role"}`]);
  const shows = live.shownAt ? `shows the state of ${when(live.shownAt)}, and ` : "";
  let text = "";
  if (live.refused) {
    text = `The coordinator refuses this login now: ${live.refused.message}. The page ${shows}tries again by itself.`;
  } else if (!live.isConnected && (live.seenAt || live.problem !== null)) {
    const since = live.seenAt ? `since ${when(live.seenAt)}` : "yet";
    text = `No contact ${since}${live.problem ? ` (${live.problem})` : ""}. The page ${shows}connects again by itself.`;
  } else if (live.lost) {
    const why = live.lost.message ? ` (${live.lost.message})` : "";
    text = `No contact with the coordinator since ${when(live.lost.since)}${why}. The page ${shows}connects again by itself.`;
  }
  setText(contact, text);
}

// What Esc closes is up to the view. "/" leads to its search field.
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.matches("input, textarea, select")) return;
  const field = main.querySelector("input[type=search]");
  if (field) {
    event.preventDefault();
    field.focus();
  }
});

onChange((changes) => {
  if (changes.has("state")) showContact();
  if (changes.has("role")) draw(false);
});
async function begin() {
  try {
    await connect();
  } catch (error) {
    contact.className = "bad";
    contact.textContent = safe(`The page can't begin: ${error.message}. ${error.isTransient ? "It tries again by itself." : "Load it again."}`);
    if (error.isTransient) setTimeout(begin, BEGIN_MS);
    return;
  }
  if (contact.className) draw(false); // views have asked in vain
  contact.className = "";
  showContact();
}

draw(false);
begin();
