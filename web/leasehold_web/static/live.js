// The live view: what the server streams, kept in maps, and who is told of changes.
import { ask } from "/static/dom.js";
import { knownName, learnFromCommand, learnName } from "/static/names.js";
import { learnTime, now } from "/static/server_time.js";
import { addStream, areReleased } from "/static/window_streams.js";
import { CONCLUDED, ENDED, gpusOf, workloadsOf } from "/static/words.js";

export const live = {
  workers: new Map(),
  gpus: new Map(),
  workloads: new Map(),
  commands: new Map(),
  events: new Map(),
  gpusOf: new Map(), // the UUIDs of each worker, in the order of slots
  workloadsOf: new Map(), // the ids of each worker's workloads
  session: { identity: "", role: "" },
  isLoading: true,
  isConnected: false,
  lost: null, // since when and why the server has no contact with the coordinator
  refused: null, // why the coordinator refuses this login now
  problem: null, // why this window has no live view: a text, which is empty if unknown. null: it has one, or begins
  seenAt: 0, // when the last message came
  shownAt: 0, // the time of the shown state, or 0 if nothing was shown
};

const ROLES = ["", "VIEWER", "USER", "OPERATOR", "ADMIN"];
const MAPS = { worker: "workers", gpu: "gpus", workload: "workloads", command: "commands", event: "events" };
const KEPT = 512; // events, ended commands and ended workloads that the page keeps
const SESSION_MS = 10000; // how often a shown page reads its role
const LATE_MS = 1000; // how long a window that is shown again connects before it says that it has no contact
const SILENT_MS = 25000; // how long a stream may tell nothing
const REFUSED_MS = 10000; // how long a refused login waits before it is tried again
const listeners = new Set();
let reads = 0; // of the session
let reading = 0; // reads under way
let latestRead = 0; // the number of the latest read that was answered
const places = new Map(); // the host and slot of each GPU, also of those that are no longer reported
const ended = new Set(); // the ids of ended workloads, the first that ended first
let changed = new Map();
let isScheduled = false;
let source = null;
let heardAt = 0; // when the stream was opened, or told something last
let retryMs = 500;
let fresh = null; // after a new connection: the keys that came, until the view is complete
let hasNews = false; // whether changes came since the last state of the stream
let wasShown = false; // whether views have shown the answers of an earlier connection, or its refusal

export function may(role) {
  return ROLES.indexOf(live.session.role) >= ROLES.indexOf(role);
}

// Whether the caller may act on a workload: an operator on all, a user on own ones.
export function mayActOn(workload) {
  return may("OPERATOR") || (may("USER") && workload.owner === (live.session.on_behalf_of || live.session.identity));
}

// Whether the caller may cancel a command: an operator each one, a user own ones, and those of own workloads alone. Who
// requested others' commands is hidden.
export function mayCancel({ actor, on_behalf_of: user, owners = [] }) {
  const isOwn = (owner) => owner === (live.session.on_behalf_of || live.session.identity);
  return may("OPERATOR") || (may("USER") && (isOwn(user || actor) || (owners.length > 0 && owners.every(isOwn))));
}

// Calls a function after changes, with a set of ids for each kind of entry. Returns how to end that. The kind "gap"
// tells that the view is complete again after lost changes, and "role" that the caller or its role is another.
export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

// The time of the shown state, if it may have changed since: without contact, or if the login is refused. Undefined: the
// page shows the present state.
export function staleSince() {
  return live.refused || live.lost || (!live.isConnected && live.seenAt) ? live.shownAt : undefined;
}

// Whether earlier answers about entries of a kind, or about one of them, may be old: after a gap, or since an entry has
// gone. An entry goes if it is deleted, and if it ended while nobody watched.
export function areOld(changes, kind, id) {
  const isGone = (one) => (id === undefined || one === id) && !live[MAPS[kind]].has(one);
  return changes.has("gap") || [...(changes.get(kind) ?? [])].some(isGone);
}

async function askForSession() {
  reading += 1;
  try {
    return await ask("/api/session");
  } finally {
    reading -= 1;
  }
}

// Reads the caller and its role anew.
export async function readSession() {
  const mine = ++reads;
  const askedAt = Date.now();
  const { time, full = "", ...session } = await askForSession();
  if (mine < latestRead) return; // the answer is old
  latestRead = mine;
  const before = live.session;
  learnTime(time, askedAt, Date.now());
  if (!live.isConnected && (full || live.problem !== null)) fail(full);
  live.session = { identity: "", role: "", ...session };
  // Another window may have logged in as somebody else.
  if (["identity", "on_behalf_of", "role"].every((key) => before[key] === live.session[key])) return;
  if (before.identity) {
    note("role", "");
    // An open stream goes on for the caller that opened it.
    if (source && ["identity", "on_behalf_of"].some((key) => before[key] !== live.session[key])) reopen();
  }
  note("state", "");
}

export async function connect() {
  await readSession();
  addStream({ open: shown, close: rest });
  setInterval(() => document.visibilityState === "visible" && live.isConnected && !reading && readSession().catch(() => {}), SESSION_MS);
  setInterval(() => {
    if (source && now() - heardAt > SILENT_MS) lose();
  }, 5000);
  window.addEventListener("online", () => !live.isConnected && reopen());
}

function shown() {
  if (!source) {
    open();
    setTimeout(() => note("state", ""), LATE_MS);
  } else if (!live.isConnected) reopen();
}

function open() {
  clearTimeout(timer);
  source = new EventSource("/api/live");
  source.onmessage = (event) => take(JSON.parse(event.data));
  source.onerror = lose;
  heardAt = now();
}

// A stream does not tell why it failed.
function lose() {
  live.problem ??= "";
  reopen();
}

function fail(problem) {
  live.problem = problem;
  note("state", "");
}

let timer = 0;

function rest() {
  clearTimeout(timer);
  source?.close();
  source = null;
  live.isConnected = false;
}

function reopen() {
  source?.close();
  source = null;
  live.isConnected = false;
  note("state", "");
  clearTimeout(timer);
  if (areReleased()) return;
  timer = setTimeout(async () => {
    try {
      // Asked first: an EventSource does not tell that nobody is logged in any more.
      await readSession();
      if (!source && !areReleased()) open();
    } catch (error) {
      fail(error.message);
      reopen();
    }
  }, retryMs * (0.6 + Math.random() * 0.4));
  retryMs = Math.min(retryMs * 2, 4000);
}

// A login without a role may get one again. One that has ended is told so by the answer for the session.
function refuse() {
  retryMs = REFUSED_MS;
  reopen();
  readSession().catch(() => {});
}

function take(message) {
  live.seenAt = heardAt = now();
  if (!live.isConnected) {
    live.isConnected = true;
    live.problem = null;
    retryMs = 500;
    note("state", "");
  }
  if (message.reset) fresh = new Set();
  for (const [kind, id, row] of message.changes ?? []) {
    fresh?.add(`${kind} ${id}`);
    put(kind, id, row);
  }
  if (message.state) {
    live.isLoading = message.state.is_loading;
    live.lost = message.state.lost ?? null;
    live.refused = message.state.refused ?? (live.isLoading ? live.refused : null); // until a view says otherwise
    if (message.state.refused) {
      wasShown = true;
      refuse();
    }
    if (!live.isLoading && !live.lost && fresh) dropStale();
    note("state", "");
  }
  // The server itself had no contact, and got a snapshot. What began and ended before it is in no snapshot.
  // Its token is also refused after a change of the caller's role.
  if (message.gap) {
    note("gap", "");
    readSession().catch(() => {});
  }
  noteShown(message);
}

// A refusal and a loss of contact come as messages, too, and they show nothing new.
function noteShown({ changes = [], state }) {
  hasNews ||= changes.length > 0;
  if (!fresh && !live.isLoading && !live.lost && !live.refused) live.shownAt = now();
  // The server has the entries of before the loss.
  else if (hasNews && state) live.shownAt = Math.max(live.shownAt, live.lost?.since ?? now());
  if (state) hasNews = false;
}

// Removes what has gone while there was no connection. Ended entries stay, since no snapshot has them.
function dropStale() {
  for (const [kind, name] of [["worker", "workers"], ["gpu", "gpus"], ["workload", "workloads"]]) {
    for (const id of [...live[name].keys()]) if (!fresh.has(`${kind} ${id}`)) put(kind, id, null);
  }
  for (const [id, command] of [...live.commands]) {
    if (!fresh.has(`command ${id}`) && !CONCLUDED.has(command.state)) put("command", id, null);
  }
  fresh = null;
  if (wasShown) note("gap", "");
  wasShown = true;
}

function put(kind, id, row) {
  const map = live[MAPS[kind]];
  const before = map.get(id);
  if (row === null) map.delete(id);
  else map.set(id, kind === "gpu" && before?.sample && !row.sample ? { ...row, sample: before.sample } : row);
  if (row && kind === "workload") learnName(id, row.name);
  if (row && kind === "event") learnName(row.workload_id, row.workload_name);
  if (row && kind === "command") learnFromCommand(row);
  if (row && kind === "gpu") places.set(id, { worker_id: row.worker_id, slot: row.slot });
  if (kind === "gpu") index(live.gpusOf, before, row, id, (one) => live.gpus.get(one).slot);
  if (kind === "workload") index(live.workloadsOf, before, row, id, null);
  if (kind === "event" && map.size > KEPT) map.delete(map.keys().next().value);
  if (kind === "command" && map.size > 2 * KEPT) {
    for (const [old, command] of map) if (CONCLUDED.has(command.state) && map.size > KEPT) map.delete(old);
  }
  if (kind === "workload") boundEnded(id, row);
  note(kind, id);
  const worker = row?.worker_id ?? before?.worker_id;
  if ((kind === "gpu" || kind === "workload") && worker) note("worker", worker);
}

// Keeps the latest ended workloads only.
function boundEnded(id, row) {
  if (ENDED.has(row?.status?.state)) ended.add(id);
  else ended.delete(id);
  if (ended.size <= KEPT) return;
  const [oldest] = ended;
  ended.delete(oldest);
  index(live.workloadsOf, live.workloads.get(oldest), null, oldest, null);
  live.workloads.delete(oldest);
}

function index(groups, before, row, id, key) {
  const old = before?.worker_id;
  const now = row?.worker_id;
  if (old && old !== now) {
    const left = (groups.get(old) ?? []).filter((one) => one !== id);
    if (left.length) groups.set(old, left);
    else groups.delete(old);
  }
  if (now && old !== now) {
    const group = groups.get(now) ?? [];
    group.push(id);
    if (key) group.sort((a, b) => key(a) - key(b));
    groups.set(now, group);
  }
}

function note(kind, id) {
  if (!changed.has(kind)) changed.set(kind, new Set());
  changed.get(kind).add(id);
  if (isScheduled) return;
  isScheduled = true;
  // A hidden window draws no frames.
  if (document.visibilityState === "visible") requestAnimationFrame(tell);
  else setTimeout(tell, 200);
}

function tell() {
  isScheduled = false;
  const told = changed;
  changed = new Map();
  for (const listener of [...listeners]) listener(told);
}

export function setSample(uuid, sample) {
  const gpu = live.gpus.get(uuid);
  if (!gpu) return;
  gpu.sample = sample;
  note("sample", gpu.worker_id);
}

const COMING = "…"; // in the place of a name that is not known yet

// Whether names that are not known may still come with the live view.
export const awaitsNames = () => live.isLoading && !live.refused && !live.problem;

// The name of a host. That of a deleted one is known from the stored history, once that is loaded.
export function workerName(id) {
  const name = live.workers.get(id)?.name;
  return name ?? (awaitsNames() ? knownName(id) ?? COMING : `${knownName(id) ?? id}${live.isLoading ? "" : " (deleted)"}`);
}

// Whether a host has a page.
export function hasPage(id) {
  return live.isLoading || live.workers.has(id);
}

export function workloadName(id) {
  return nameIn(id) ?? (awaitsNames() ? COMING : id);
}

const nameIn = (id) => live.workloads.get(id)?.name ?? knownName(id);

// An id in a command or in a path stays, and a quoted UUID of a GPU, which was given so.
const IDS = /`leasehold [^`]*`|(?<!')GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<!\/)\bw-[0-9a-f]{12}\b(?!\/)/g;

// A message of the API with places and names instead of the UUIDs and ids that the page knows.
export function withNames(text = "") {
  return text.replace(IDS, (id) => (id.startsWith("`") ? id : live.gpus.has(id) ? placeOf(id) : nameIn(id) ?? id));
}

// The target of a command: its workloads, its GPUs or its host.
export function targetOf(command) {
  return workloadsOf(command).map(workloadName).join(", ") || gpusOf(command).map(placeOf).join(", ") || workerName(command.worker_id);
}

// The last place of a GPU that the coordinator does not report, such as after its restart. Its host exists, and no other
// GPU has the place.
function formerPlace(uuid) {
  const place = places.get(uuid);
  if (!place || !live.workers.has(place.worker_id)) return undefined;
  const isTaken = (live.gpusOf.get(place.worker_id) ?? []).some((one) => live.gpus.get(one).slot === place.slot);
  return isTaken ? undefined : place;
}

// HOST/SLOT of a GPU, as the command line writes it.
export function placeOf(uuid) {
  const gpu = live.gpus.get(uuid) ?? formerPlace(uuid);
  if (!gpu) return awaitsNames() ? COMING : uuid;
  return `${workerName(gpu.worker_id)}/${gpu.slot ?? 0}`;
}
