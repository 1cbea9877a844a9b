// One workload: state, GPUs, policy, hooks, checkpoints, its lane of the timeline, commands, events and output.
import { append, ask, h, redraw, replace, setText, showProblem } from "/static/dom.js";
import { commandActions, workloadActions } from "/static/actions.js";
import { age } from "/static/ages.js";
import { commandView } from "/static/command_view.js";
import { list } from "/static/drawer.js";
import { eventsView, merged } from "/static/events_view.js";
import { glyph } from "/static/glyphs.js";
import { areOld, awaitsNames, hasPage, live, mayActOn, onChange, placeOf, withNames, workerName } from "/static/live.js";
import { miniTimeline } from "/static/mini_timeline.js";
import { learnFromHistory } from "/static/names.js";
import { bytes, CONCLUDED, count, ENDED, lower, moment, parkedAt, parkedText, policyText, seconds, stateText, UNKNOWN, workloadsOf } from "/static/words.js";
import { addStream } from "/static/window_streams.js";

const OUTPUT_CHARACTERS = 400000; // the latest ones, which the page shows
const RETRY_MS = 2000; // after an answer that failed
const FINAL = new Set(["WRONG_STATE", "UNKNOWN_WORKLOAD"]); // refusals that seldom change once a workload has ended
const FINAL_RETRY_MS = 60000; // after one of them
const SETTLED_MS = 25000; // after which an open stream has no refusal any more

export function show(main, id) {
  const page = h("div", { class: "page" }, h("p", { class: "empty" }, "Loading…"));
  append(main, [page]);
  let found = null;
  let drawAll = null;
  let drawCheckpoints = null;
  let ends = [];
  let isOver = false;
  let listings = 0;

  // By id after the first answer, since the name may pass to another workload.
  async function load() {
    try {
      found = await ask(`/api/workloads/${encodeURIComponent(found?.workload.workload_id ?? id)}`);
    } catch (error) {
      if (!isOver) fail(error);
      return;
    }
    if (isOver) return;
    if (drawAll) drawAll();
    else build();
    loadCheckpoints();
  }

  // After the rest: the answer is late if the worker is silent.
  async function loadCheckpoints() {
    const mine = ++listings;
    const id = found.workload.workload_id;
    const answer = await ask(`/api/workloads/${encodeURIComponent(id)}/checkpoints`).catch((error) => ({ refusal: error }));
    if (isOver || mine !== listings) return; // a later answer is newer, even if it comes first
    drawCheckpoints(answer);
    if (answer.refusal?.isTransient) setTimeout(() => !isOver && mine === listings && loadCheckpoints(), RETRY_MS);
  }

  function fail(error) {
    if (error.isTransient) setTimeout(() => !isOver && load(), RETRY_MS);
    else if (error.status === 403) waitForRole();
    else leave();
    if (error.isTransient && found) return;
    showProblem(page, found && error.status === 404 ? `The workload ${found.workload.name} was deleted.` : error.message);
  }

  // The view is built anew when the login has a role again.
  function waitForRole() {
    endAll();
    drawAll = null;
    ends.push(onChange((changes) => changes.has("gap") && load()));
  }

  function endAll() {
    for (const end of ends.splice(0)) end();
  }

  function leave() {
    isOver = true;
    endAll();
  }

  function build() {
    const key = found.workload.workload_id;
    const title = h("div", { class: "title-line" });
    const facts = h("section", { class: "card", "aria-label": "State" });
    const spec = h("section", { class: "card", "aria-label": "Specification" });
    const commands = h("section", { class: "card whole", "aria-label": "Commands" });
    const events = h("section", { class: "card", "aria-label": "Events" });
    const mini = miniTimeline(key, () => live.workloads.get(key) ?? found.workload, () => found.commands, () => draw());
    const lane = h("section", { class: "card whole", "aria-label": "Timeline" }, h("h2", {}, "Timeline", h("small", {}, "where it was, and when it was parked")), mini.element);
    const parts = [facts, spec, lane, commands, events];
    const checkpoints = h("section", { class: "card", "aria-label": "Checkpoints" }, h("h2", {}, "Checkpoints"), h("p", { class: "muted" }, "Asking its worker…"));
    parts.push(checkpoints);
    const cards = h("div", { class: "cards" }, parts);
    let output = null; // until the role is known, which may be after the first answer
    replace(page, title, cards);
    const draw = () => {
      const workload = live.workloads.get(key) ?? found.workload;
      found.workload = workload;
      document.title = `${workload.name} · Leasehold`;
      const status = workload.status ?? {};
      replace(title, h("h1", {}, glyph(status.state), workload.name), h("span", { class: "badge" }, stateText(workload)),
        workload.out_of_contact && h("span", { class: "badge" }, ...lastKnown(workload)),
        h("div", { class: "actions" }, workloadActions(workload)));
      replace(facts, h("h2", {}, "State"), stateFacts(workload));
      replace(spec, h("h2", {}, "Specification"), specFacts(workload));
      if (!output && mayActOn(workload)) {
        output = outputCard(key);
        cards.append(output.element);
      }
    };
    const drawCommands = () => {
      const all = new Map(found.commands.map((one) => [one.command_id, one]));
      for (const [one, command] of live.commands) if (workloadsOf(command).includes(key) && (all.get(one)?.revision ?? 0) <= (command.revision ?? 0)) all.set(one, command);
      const sorted = [...all.values()].sort((a, b) => b.create_time - a.create_time).slice(0, 50);
      replace(commands, h("h2", {}, "Commands"), sorted.length ? sorted.map((one) => commandView(one, { actions: commandActions(one) })) : h("p", { class: "muted" }, "No command yet."));
    };
    const drawEvents = () => {
      redraw(events, h("h2", {}, "Events"), eventsView(merged(found.events, live.events.values(), (one) => one.workload_id === key)));
    };
    drawAll = () => {
      draw();
      drawCommands();
      drawEvents();
      learnFromHistory(found.commands).then(() => !isOver && drawCommands()); // partners that have ended
    };
    drawCheckpoints = (answer) => {
      checkpoints.hidden = answer.refusal?.reason === "NOT_PERMITTED"; // the caller may not read them
      replace(checkpoints, h("h2", {}, "Checkpoints"), checkpointsTable(answer));
    };
    // The facts that a change of the list of checkpoints follows from: the workload, its commands and deletions of
    // checkpoints on its worker, and the state of the worker.
    const basisOfCheckpoints = () => {
      const { worker_id: host, status = {} } = live.workloads.get(key) ?? found.workload;
      const isAbout = (one) => workloadsOf(one).includes(key) || (one.worker_id === host && one.operation?.delete_checkpoints);
      const over = [...live.commands.values()].filter((one) => CONCLUDED.has(one.state) && isAbout(one)).map((one) => one.command_id);
      return JSON.stringify([status.state, status.checkpoint_id, live.workers.get(host)?.state, over]);
    };
    let checkpointsOf = basisOfCheckpoints();
    let awaited = awaitsNames();
    drawAll();
    endAll();
    ends = [mini.end, () => output?.end(), onChange((changes) => {
      if (areOld(changes, "workload", key)) load();
      if (changes.get("workload")?.has(key) || changes.has("state")) draw();
      const hasOwn = (kind, isOwn) => [...(changes.get(kind) ?? [])].some((one) => isOwn(live[`${kind}s`].get(one)));
      const isNamed = awaited && !awaitsNames();
      awaited = awaitsNames();
      if (isNamed || hasOwn("command", (one) => !one || workloadsOf(one).includes(key))) drawCommands(); // it may have gone
      if (isNamed || hasOwn("event", (one) => one?.workload_id === key)) drawEvents();
      const former = checkpointsOf;
      checkpointsOf = basisOfCheckpoints();
      if (checkpointsOf !== former) loadCheckpoints();
    })];
  }

  load();
  return leave;
}

// A workload may be newer than the last report of its worker.
function lastKnown({ report_time: time, create_time: created, status }) {
  if (!time) return ["last known, before a restart"];
  return status?.state === "PENDING" && time < created ? ["not reported yet"] : ["last known, ", age(time)];
}

function stateFacts(workload) {
  const status = workload.status ?? {};
  const gpus = status.lease?.gpu_uuids ?? [];
  const facts = [["GPUs", gpus.length ? gpus.map((uuid, at) => [at > 0 && ", ", h("a", { href: `/?gpu=${encodeURIComponent(uuid)}` }, placeOf(uuid))]) : "none"]];
  const parked = parkedText(workload);
  if (parked) facts.push(["Parked", [parkedAt(workload).size === undefined && "size unknown ", parked, status.park_time && ", ", status.park_time && age(status.park_time)]]);
  if (status.parked_by) facts.push(["Suspended by", policyText(status.parked_by)]);
  if (status.parked_gpu_uuids?.length) facts.push(["Former GPUs", status.parked_gpu_uuids.map(placeOf).join(", ")]);
  const host = workerName(workload.worker_id);
  facts.push(["Host", hasPage(workload.worker_id) ? h("a", { href: `/workers/${encodeURIComponent(workload.worker_id)}` }, host) : host], ["Owner", workload.owner ?? UNKNOWN]);
  if (workload.user) facts.push(["User", workload.user]);
  facts.push(["Created", moment(workload.create_time)]);
  if (status.start_time) facts.push(["Started", age(status.start_time)]);
  if (status.ready_time) facts.push(status.start_time ? ["Ready after", seconds((status.ready_time - status.start_time) / 1000)] : ["Ready since", moment(status.ready_time)]);
  if (status.end_time) facts.push(["Ended", moment(status.end_time)]);
  if (status.exit) facts.push(["Exit", status.exit.signal_number ? `signal ${status.exit.signal_number}` : `code ${status.exit.code ?? 0}`]);
  else if (status.state === "EXITED" && status.end_time) facts.push(["Exit", "unknown: only the parent of the program learns it"]);
  if (status.root_pid) facts.push(["Processes", `${status.root_pid}${status.members?.length ? `, ${status.members.length} with CUDA: ${status.members.map((one) => `${one.pid} ${lower(one.state)}`).join(", ")}` : ""}`]);
  if (status.kernel) facts.push(["Application", `${status.kernel.kind ?? ""} ${status.kernel.kernel_id ?? ""}${status.kernel.health ? `, ${lower(status.kernel.health)}` : ""}`]);
  if (status.error) facts.push(["Error", h("div", { class: "box bad" }, withNames(status.error.message))]);
  facts.push(["Id", h("code", {}, workload.workload_id)]);
  return list(facts);
}

function specFacts(workload) {
  const spec = workload.spec;
  // The origin is visible to the same callers as the specification.
  if (!spec) return h("p", { class: "muted" }, workload.origin ? "The specification is unknown: the worker has not reported it yet." : "Only its owner and operators see the specification.");
  const resources = spec.resources ?? {};
  const facts = [];
  if (spec.arguments?.length) facts.push(["Command", h("code", {}, spec.arguments.join(" "))]);
  const wanted = [count(resources.gpu_count ?? 0, "GPU")];
  if (resources.gpu_name) wanted.push(resources.gpu_name);
  if (resources.gpu_memory_bytes) wanted.push(`at least ${bytes(resources.gpu_memory_bytes)} each`);
  if (resources.cpu_millicores) wanted.push(`${resources.cpu_millicores / 1000} cores`);
  if (resources.memory_bytes) wanted.push(`${bytes(resources.memory_bytes)} of memory`);
  facts.push(["Resources", wanted.join(", ")], ["Priority", String(spec.priority ?? 0)]);
  facts.push(["Eviction policy", policyText(spec.eviction)]);
  if (spec.helper) facts.push(["Preemptible", `yes: ${spec.helper.process_strategy === "STOP" ? "stopped" : "suspended"} ${seconds(spec.helper.grace ?? 10)} after a yield request`]);
  facts.push(["Hooks", spec.hooks?.length ? h("ul", { class: "capabilities" }, spec.hooks.map((hook) => h("li", {}, "•", h("div", {}, hookText(hook))))) : "none"]);
  const names = [...Object.keys(spec.environment ?? {}), ...Object.keys(spec.secret_environment ?? {}).map((one) => `${one} (secret)`)];
  if (names.length) facts.push(["Environment", names.join(", ")]);
  for (const [key, value] of Object.entries(workload.labels ?? {})) facts.push(["Label", `${key}=${value}`]);
  return list(facts);
}

const HOOKS = ["command", "http", "signal", "vllm", "sglang", "kernel"];

function hookText(hook) {
  const kind = HOOKS.find((one) => hook[one]) ?? "hook";
  const inner = hook[kind] ?? {};
  const what = inner.url ?? inner.base_url ?? inner.arguments?.join(" ") ?? inner.signal_number ?? "";
  return `${hook.name || kind}: ${hook.phase ? `${lower(hook.phase)}, ` : ""}${kind} ${what}`;
}

function checkpointsTable(answer) {
  if (answer.refusal?.reason === "UNKNOWN_WORKER") return h("p", { class: "muted" }, "Its worker was deleted, and has its checkpoints. They are listed again if the worker returns.");
  if (answer.refusal) return h("p", { class: "muted" }, `Its checkpoints are not known: ${answer.refusal.message}`);
  if (!answer.checkpoints.length) return h("p", { class: "muted" }, answer.unreachable.length ? "Its worker does not answer, so its checkpoints are unknown." : "No checkpoint on the disk of its worker.");
  const rows = answer.checkpoints.map((one) => h("tr", {}, h("td", {}, h("code", {}, one.checkpoint_id)), h("td", {}, lower(one.kind)), h("td", {}, bytes(one.size_bytes)), h("td", {}, age(one.create_time)), h("td", {}, one.problem || (one.in_use_unknown ? "perhaps in use" : one.in_use ? "in use" : ""))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of checkpoints" }, h("table", {}, h("thead", {}, h("tr", {}, ["Checkpoint", "Kind", "Size", "Age", ""].map((one) => h("th", { scope: "col" }, one)))), h("tbody", {}, rows)));
}

function outputCard(id) {
  const text = h("pre", { class: "output", tabindex: "0", role: "log", "aria-label": "Output", "aria-live": "off" });
  const follow = h("input", { type: "checkbox", id: "follow", checked: true });
  const size = h("span", {});
  const told = h("span", { role: "status" });
  let source = null;
  let retry = 0;
  let isPaused = false;
  let isRefused = false;
  let isOver = false;
  let attempt = 0; // number of streams
  let settling = 0;
  let isCut = false; // whether the begin is not shown
  let shown = 0; // the number of characters
  let isDrawing = false;
  let offset = -OUTPUT_CHARACTERS; // from the end of the output: a character has at least one byte
  let end = 0; // after the last part. The offset is before it if the part ends within a character
  let remove = () => {};
  function open() {
    if (source) return;
    isPaused = false;
    clearTimeout(retry);
    source = new EventSource(`/api/workloads/${encodeURIComponent(id)}/output?offset=${offset}`);
    attempt += 1;
    // A refusal comes by an open stream, and a program may write nothing for long.
    const settle = () => {
      isRefused = false;
      setText(told, "");
    };
    source.onopen = () => {
      settling = setTimeout(settle, isRefused ? SETTLED_MS : 0);
    };
    source.onmessage = (event) => {
      const part = JSON.parse(event.data);
      isCut ||= offset < 0 && part.offset > 0;
      const hole = end > 0 && part.offset > end ? `\n[${bytes(part.offset - offset)} are no longer kept]\n` : "";
      offset = Number(event.lastEventId) || part.next_offset;
      end = part.next_offset;
      text.append(hole + part.text);
      shown += hole.length + part.text.length;
      cut();
      scroll();
      size.textContent = `${bytes(offset)}${isCut ? `, of which the last ${shown.toLocaleString("en")} characters are shown` : ""}`;
      settle();
    };
    source.addEventListener("end", () => {
      isOver = true;
      setText(told, "complete");
      remove();
    });
    source.addEventListener("refused", (event) => {
      close();
      isRefused = true;
      const { message, reason } = JSON.parse(event.data);
      setText(told, message);
      const state = live.workloads.get(id)?.status?.state;
      again(FINAL.has(reason) && (!state || ENDED.has(state)) ? FINAL_RETRY_MS : RETRY_MS);
    });
    source.onerror = () => {
      close();
      again(RETRY_MS);
      tellBreak();
    };
  }
  // A stream does not tell why it failed.
  async function tellBreak() {
    const known = attempt;
    const { full } = await ask("/api/session").catch(() => ({}));
    if (attempt === known && !isPaused && !isOver) setText(told, `interrupted${full ? `: ${full}` : ""}. The page asks for the rest again.`);
  }
  function pause() {
    close();
    isPaused = true;
    isRefused = false;
    setText(told, "paused: another window shows an output. This output goes on once you use this window.");
  }
  // Once per frame: each look at the height draws the whole text.
  function scroll() {
    if (isDrawing) return;
    isDrawing = true;
    requestAnimationFrame(() => {
      isDrawing = false;
      if (follow.checked) text.scrollTop = text.scrollHeight;
    });
  }
  function cut() {
    let over = shown - OUTPUT_CHARACTERS;
    isCut ||= over > 0;
    shown = Math.min(shown, OUTPUT_CHARACTERS);
    while (over > 0) {
      const first = text.firstChild;
      over -= first.length;
      if (over >= 0) first.remove();
      else first.deleteData(0, first.length + over);
    }
  }
  function close() {
    clearTimeout(retry);
    clearTimeout(settling);
    source?.close();
    source = null;
  }
  // Only its last message tells that an output is complete, even that of an ended workload.
  function again(wait) {
    retry = setTimeout(open, wait);
  }
  remove = addStream({ open, close, pause, isPaused: () => isPaused });
  const element = h("section", { class: "card whole", "aria-label": "Output" }, h("h2", {}, "Output"), text, h("div", { class: "output-tools" }, h("label", { for: "follow" }, follow, " Follow"), size, told));
  return { element, end: remove };
}
