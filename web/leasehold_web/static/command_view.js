// A command: its state, and its phases with their seconds, bytes and rates.
import { age } from "/static/ages.js";
import { h } from "/static/dom.js";
import { glyph } from "/static/glyphs.js";
import { targetOf, withNames, workerName, workloadName } from "/static/live.js";
import { actorOf, bytes, CONCLUDED, lower, operationOf, outcomeOf, rate, seconds, workloadsOf } from "/static/words.js";

export function commandView(command, { hasActions = true, actions = [] } = {}) {
  const workloads = workloadsOf(command);
  const isOver = CONCLUDED.has(command.state);
  return h("article", { class: "command", "data-of": command.command_id },
    h("header", {}, glyph(command.state), h("b", {}, operationOf(command)),
      workloads.length ? h("span", {}, links(workloads)) : h("a", { href: `/workers/${encodeURIComponent(command.worker_id)}` }, targetOf(command)),
      h("span", { class: "badge" }, outcomeOf(command)),
      !isOver && command.phase && h("span", { class: "muted" }, command.phase),
      !isOver && command.cancel_requested && h("span", { class: "badge" }, "cancellation requested"),
      h("span", { class: "spacer" }),
      h("span", { class: "muted" }, command.actor ? `${actorOf(command)} · ` : "", age(command.create_time, { title: new Date(command.create_time).toLocaleString() }), command.end_time ? ` · ${seconds((command.end_time - command.create_time) / 1000)}` : ""),
      hasActions && actions),
    command.state === "UNKNOWN" && outOfContact(command),
    !isOver && command.state !== "UNKNOWN" && h("div", { class: "running-bar", role: "progressbar", "aria-label": `The ${operationOf(command)} goes on: ${command.phase || lower(command.state)}` }),
    command.error && command.state !== "UNKNOWN" && h("p", { class: "error" }, withNames(command.error.message)),
    command.operation?.cordon?.reason && h("p", { class: "why" }, command.operation.cordon.reason),
    preempted(command.result?.preempted_workload_ids ?? []),
    phases(command.result ?? {}),
    command.state !== "SUCCEEDED" && members(command),
    (command.result?.warnings ?? []).map((one) => h("p", { class: "why" }, withNames(one))));
}

// The workloads that the command suspended first, and that were suspended at its end.
function preempted(ids) {
  return ids.length > 0 && h("p", { class: "why" }, "Suspended first: ", links(ids), ".");
}

function links(ids) {
  return ids.map((id, at) => [at > 0 && ", ", h("a", { href: `/workloads/${encodeURIComponent(id)}` }, workloadName(id))]);
}

function outOfContact(command) {
  const host = h("a", { href: `/workers/${encodeURIComponent(command.worker_id)}` }, workerName(command.worker_id));
  return h("p", { class: "why" }, "Its host ", host, " is out of contact. The outcome is known when the host returns.");
}

// The processes after a failure, and whether each was rolled back. The error of the command is not repeated.
function members(command) {
  const list = command.result?.members ?? [];
  return list.length > 0 && h("ul", { class: "steps", "aria-label": "Processes" }, list.map((one) => {
    const back = one.rolled_back === undefined ? "" : one.rolled_back ? ", rolled back" : ", NOT rolled back";
    const error = one.error && one.error.message !== command.error?.message ? `: ${withNames(one.error.message)}` : "";
    return h("li", {}, `pid ${one.pid}: ${lower(one.state_before)} → ${lower(one.state_after)}${back}${error}`);
  }));
}

const KINDS = { lock: "", checkpoint: "p2", save: "p2", image: "p2", restore: "p1", resume: "p1", load: "p1", start: "p1", unlock: "", verify: "p3", preflight: "p3", hooks: "p3" };

// The moved bytes of a phase are those of its calls to the members.
export function phases(result) {
  const list = (result.phases ?? []).map((one) => ({ ...one }));
  for (const one of list) {
    const calls = (result.members ?? []).flatMap((member) => member.phases ?? []).filter((call) => call.phase === one.phase && Boolean(call.rollback) === Boolean(one.rollback));
    one.moved_bytes ??= calls.reduce((sum, call) => sum + (call.moved_bytes ?? 0), 0);
  }
  const total = list.reduce((sum, one) => sum + (one.duration ?? 0), 0);
  if (!list.length || !total) return null;
  const kind = (one) => (one.failed ? "failed" : KINDS[one.phase] ?? "");
  const bar = h("div", { class: "phases", "aria-hidden": "true" }, list.map((one) => {
    const part = h("i", { class: kind(one), title: one.phase });
    part.style.flexGrow = String((one.duration ?? 0) / total);
    part.style.flexBasis = "0";
    return part;
  }));
  return h("div", {}, bar, h("ul", { class: "phase-list" }, list.map((one) => h("li", {}, h("i", { class: kind(one) }), h("b", {}, one.rollback && one.phase !== "rollback" ? `undoing ${one.phase}` : one.phase), ` ${seconds(one.duration ?? 0)}`, one.moved_bytes ? ` · ${bytes(one.moved_bytes)} · ${rate(one.moved_bytes, one.duration)}` : "", one.failed ? " · failed" : ""))));
}
