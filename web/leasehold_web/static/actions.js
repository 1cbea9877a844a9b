// What a user may do: the buttons and their dialogs.
import { confirm } from "/static/confirmation.js";
import { h } from "/static/dom.js";
import { effectsOfDrain, holdersOf, plansOfDrain } from "/static/drain.js";
import { live, may, mayActOn, mayCancel, placeOf, targetOf, workerName } from "/static/live.js";
import { beginPick } from "/static/picker.js";
import { CONCLUDED, count, ENDED, held, lower, operationOf, PARKED, parkedText, RESTORABLE, workloadsOf } from "/static/words.js";

const BUSY = new Set(["PENDING", "SUSPENDING", "RESTORING", "REMAPPING", "STOPPING"]);

const formerOf = (workload) => workload.status?.parked_gpu_uuids ?? [];

export function workloadActions(workload) {
  const state = workload.status?.state;
  if (ENDED.has(state)) return [];
  if (!mayActOn(workload)) return [h("p", { class: "why" }, may("USER") ? `Only ${workload.owner} and operators act on this workload.` : "Your role only reads.")];
  const buttons = [];
  if (state === "RUNNING" && held(workload).length) {
    buttons.push(button("Suspend", () => suspend(workload)), button("Move…", () => move(workload)), button("Swap…", () => swap(workload)));
  }
  if (RESTORABLE.has(state)) buttons.push(button("Restore", () => restore(workload, []), "primary"));
  // A sleeping workload stays on its GPUs, and others need as many GPUs as before.
  if (PARKED.has(state) && state !== "SLEEPING" && formerOf(workload).length) buttons.push(button("Restore on…", () => restoreOn(workload)));
  if (needsWake(workload)) buttons.push(button("Wake", () => wake(workload), "primary"));
  buttons.push(button("Stop…", () => stop(workload), "danger"));
  return buttons;
}

export function gpuActions(gpu) {
  if (!may("OPERATOR")) return [];
  if (gpu.cordon) return hasOwnCordon(gpu) ? [button("Uncordon", () => uncordon(gpu.worker_id, [gpu.uuid]))] : [];
  return [button("Cordon…", () => cordon(gpu.worker_id, [gpu.uuid]))];
}

// Whether a GPU itself is cordoned. A free GPU of a cordoned host shows the cordon of its host.
export function hasOwnCordon({ cordon, state, worker_id: worker }) {
  return Boolean(cordon) && state !== "UNSPECIFIED" && JSON.stringify(cordon) !== JSON.stringify(live.workers.get(worker)?.cordon);
}

export function workerActions(worker) {
  if (!may("OPERATOR")) return [];
  return [
    worker.cordon ? button("Uncordon", () => uncordon(worker.worker_id, [])) : button("Cordon…", () => cordon(worker.worker_id, [])),
    button("Drain…", () => drain(worker), "danger"),
  ];
}

export function commandActions(command) {
  if (CONCLUDED.has(command.state) || command.cancel_requested || !mayCancel(command)) return [];
  return [button("Cancel…", () => cancel(command), "danger", titleOfCancellation(command))];
}

// name: what a screen reader says instead of the text, if several buttons have this text.
function button(text, onclick, kind = "", name = undefined) {
  return h("button", { onclick, class: kind, type: "button", "aria-label": name }, text);
}

const workloadSubjects = (...entries) => ({ kind: "workload", entries });

function suspend(workload) {
  confirm({
    title: `Suspend ${workload.name}`, verb: "Suspend",
    subjects: workloadSubjects(workload),
    picture: (plan, latest) => picture(held(latest).map((uuid) => [placeOf(uuid), "parked"])),
    action: { action: "suspend", workload: workload.workload_id },
  });
}

function restoreLead(workload, uuids) {
  if (!RESTORABLE.has(workload.status?.state)) return "";
  if (workload.status?.state === "UNKNOWN") return "Examines each process again, and restores those that the driver can restore.";
  if (workload.status?.state === "SLEEPING") return "On its own GPUs, where its processes still are.";
  if (!formerOf(workload).length) return "It holds no GPU.";
  return uuids.length ? "" : "On its former GPUs if they are free, or else on others of the same chip.";
}

// The GPUs of a restore: those that were picked, those that a sleeper never left, or else those of its plan.
function restorePicture(workload, uuids, plan) {
  if (!RESTORABLE.has(workload.status?.state)) return "";
  const stays = workload.status?.state === "SLEEPING" ? formerOf(workload) : [];
  const planned = (plan?.destinations ?? []).map((one) => one.gpu_uuid);
  const known = [planned, uuids, stays].find((one) => one.length) ?? [];
  return picture(known.map((uuid) => [parkedText(workload) || "parked", placeOf(uuid)]));
}

function restore(workload, uuids) {
  confirm({
    title: `Restore ${workload.name}`, verb: "Restore",
    subjects: workloadSubjects(workload),
    picture: (plan, latest) => [restorePicture(latest, uuids, plan), lead(restoreLead(latest, uuids))],
    action: { action: "restore", workload: workload.workload_id, gpu_uuids: uuids },
  });
}

// Whether hooks of the restore failed: the workload runs, but its application may not serve.
function needsWake(workload) {
  return workload.status?.state === "RUNNING" && workload.status.error?.reason === "HOOK_FAILED";
}

function wake(workload) {
  confirm({
    title: `Wake ${workload.name}`, verb: "Wake",
    subjects: workloadSubjects(workload),
    picture: (plan, latest) => needsWake(latest) && lead("Calls the hooks of its restore again."),
    action: { action: "restore", workload: workload.workload_id, gpu_uuids: [] },
  });
}

// Views other than the fleet have no picture: they lead to it first.
async function onPicture(begin) {
  if (location.pathname !== "/") {
    const { go } = await import("/static/app.js");
    await go("/");
    await new Promise((resolve) => setTimeout(resolve, 0));
  }
  begin();
}

const stateNow = (workload) => live.workloads.get(workload.workload_id)?.status?.state;
const over = (workload, state) => `${workload.name} is not ${state} any more, so there is no GPU to pick.`;

function restoreOn(workload) {
  const needed = formerOf(workload).length;
  onPicture(() => beginPick({
    worker: workload.worker_id, sources: [], needed,
    text: `Pick ${count(needed, "free GPU")} of ${workerName(workload.worker_id)} for ${workload.name}.`,
    accepts: (gpu) => gpu.state === "FREE",
    problem: () => !PARKED.has(stateNow(workload)) && over(workload, "parked"),
    done: (uuids) => restore(workload, uuids),
  }));
}

function move(workload) {
  const sources = held(workload);
  const model = live.gpus.get(sources[0])?.name;
  onPicture(() => beginPick({
    worker: workload.worker_id, sources, needed: sources.length,
    text: `Pick where ${workload.name} goes: ${count(sources.length, "free GPU")} of ${workerName(workload.worker_id)} with the same chip.`,
    accepts: (gpu) => gpu.state === "FREE" && gpu.name === model,
    problem: () => stateNow(workload) !== "RUNNING" && over(workload, "running"),
    done: (uuids) => remap(`Move ${workload.name}`, "Move", [{ workload, pairs: sources.map((uuid, at) => [uuid, uuids[at]]) }]),
  }));
}

// The picture has the GPUs that are still to be left.
function remap(title, verb, moves) {
  const steps = (pairs, latest) => pairs.filter(([from]) => held(latest).includes(from)).map(([from, to]) => [`${moves.length > 1 ? `${latest.name}: ` : ""}${placeOf(from)}`, placeOf(to)]);
  confirm({
    title, verb,
    subjects: workloadSubjects(...moves.map((one) => one.workload)),
    picture: (plan, ...latest) => picture(moves.flatMap(({ pairs }, at) => steps(pairs, latest[at]))),
    action: { action: "remap", moves: moves.map(({ workload, pairs }) => ({ workload: workload.workload_id, pairs })) },
  });
}

function swap(workload) {
  const sources = held(workload);
  const other = (gpu) => {
    const found = live.workloads.get(gpu.workload_id);
    return found && found.workload_id !== workload.workload_id && found.status?.state === "RUNNING" && held(found).length === sources.length && mayActOn(found) ? found : null;
  };
  onPicture(() => beginPick({
    worker: workload.worker_id, sources, needed: 1,
    text: `Pick a GPU of the workload that changes places with ${workload.name}. It must hold ${count(sources.length, "GPU")} of ${workerName(workload.worker_id)}.`,
    accepts: (gpu) => other(gpu) !== null,
    problem: () => stateNow(workload) !== "RUNNING" && over(workload, "running"),
    done: ([uuid]) => {
      const second = other(live.gpus.get(uuid));
      if (!second) return;
      const targets = held(second);
      const pairs = sources.map((from, at) => [from, targets[at]]);
      remap(`Swap ${workload.name} and ${second.name}`, "Swap", [{ workload, pairs }, { workload: second, pairs: pairs.map(([from, to]) => [to, from]) }]);
    },
  }));
}

// How a workload ends on request.
function endOf(state) {
  if (BUSY.has(state)) return "The end depends on the later state: a running process gets SIGTERM first, and a state that is parked in memory or an image is lost.";
  switch (state) {
    case "SUSPENDED":
      return "All processes are killed at once: their CUDA calls block, so they can't end by themselves.";
    case "UNKNOWN":
    case "WEDGED":
      return "All processes are killed at once.";
    case "CHECKPOINTED":
    case "STOPPED":
      return "The workload ends at once, since it has no process.";
    default:
      return "The first process gets SIGTERM. What has not ended after 10 s is killed.";
  }
}

// Why a stop would be refused now: another command, or a change by the worker itself, which is no command.
function busyNote(workload) {
  const other = [...live.commands.values()].find((one) => !CONCLUDED.has(one.state) && workloadsOf(one).includes(workload.workload_id));
  if (!other) return BUSY.has(workload.status?.state) && "The worker changes this workload now. The stop is refused until the end of that change.";
  const link = h("a", { href: `/commands/${encodeURIComponent(other.command_id)}` }, operationOf(other));
  return ["Another command of this workload has not ended: ", link, ". The stop is refused until its end."];
}

function effectsOfStop(workload) {
  const state = workload.status?.state;
  const uuids = held(workload);
  if (workload.isDeleted) return ["The workload was deleted."];
  if (ENDED.has(state)) return ["The workload has ended."];
  const host = live.workers.get(workload.worker_id);
  return [
    busyNote(workload),
    host && host.state !== "CONNECTED" && `The host ${host.name} is out of contact. The stop is refused until it returns.`,
    endOf(state),
    uuids.length ? `${count(uuids.length, "GPU becomes", "GPUs become")} free: ${uuids.map(placeOf).join(", ")}.` : "It holds no GPU.",
    ...fateOfState(workload),
  ].filter(Boolean);
}

// What becomes of the state of a parked workload. A stop deletes no application checkpoint. A checkpoint that was deleted
// before has no bytes.
function fateOfState({ status = {} }) {
  if (!PARKED.has(status.state)) return [];
  if (status.state !== "STOPPED") {
    return ["Its parked state is lost.", status.kernel && "Checkpoints that its application has made stay until they expire: leasehold run --from-checkpoint ID starts from one."];
  }
  const { checkpoint_id: id, disk_bytes: size } = status;
  return [id && size !== 0 && `Its checkpoint stays until it expires: leasehold run --from-checkpoint ${id} starts from it.`];
}

function stop(workload) {
  const force = h("input", { type: "checkbox", id: "force" });
  confirm({
    title: `Stop ${workload.name}`, verb: "Stop", isDanger: true,
    subjects: workloadSubjects(workload),
    effects: effectsOfStop, isSenseless: ({ isDeleted, status }) => isDeleted || ENDED.has(status?.state),
    extra: h("label", { for: "force" }, force, " Kill restored processes even if they can't be suspended first, which can hang the host"),
    action: () => ({ action: "stop", workload: workload.workload_id, force: force.checked }),
  });
}

function reasonField() {
  return h("input", { type: "text", id: "reason", maxlength: "256", required: true, pattern: ".*\\S.*", title: "Say why: blanks alone are no reason.", placeholder: "for example: replaces a fan", autocomplete: "off" });
}

// The cordon of a host, or that of a GPU of its own.
function cordonOf(worker, uuid) {
  const gpu = live.gpus.get(uuid);
  if (!uuid) return live.workers.get(worker)?.cordon;
  return gpu && hasOwnCordon(gpu) ? gpu.cordon : undefined;
}

function effectsOfCordon(worker, [uuid]) {
  const known = cordonOf(worker, uuid);
  return [
    "Leases stay, and no new one is granted.",
    uuid ? "Uncordon puts the GPU back into service." : "The host starts no workload, even without GPUs.",
    known && `It is cordoned already${known.cordoned_by ? ` by ${known.cordoned_by}` : ""}: the reason “${known.reason ?? ""}” is replaced.`,
  ].filter(Boolean);
}

function cordon(worker, uuids) {
  const reason = reasonField();
  const what = uuids.length ? uuids.map(placeOf).join(", ") : workerName(worker);
  confirm({
    title: `Cordon ${what}`, verb: "Cordon",
    effects: () => effectsOfCordon(worker, uuids),
    extra: h("div", { class: "field" }, h("label", { for: "reason" }, "Reason"), reason),
    action: () => ({ action: "cordon", worker, gpu_uuids: uuids, reason: reason.value }),
  });
}

// Which GPUs get leases again after an uncordon.
function effectsOfUncordon(worker, uuids) {
  if (!cordonOf(worker, uuids[0])) return ["It is not cordoned any more: there is nothing to do."];
  const gpus = (uuids.length ? uuids : live.gpusOf.get(worker) ?? []).map((uuid) => live.gpus.get(uuid)).filter(Boolean);
  const cordoned = uuids.length ? [] : gpus.filter(hasOwnCordon);
  const faulty = gpus.filter(({ health }) => health && health !== "THROTTLED");
  const left = gpus.filter((one) => !cordoned.includes(one) && !faulty.includes(one));
  const staysClosed = uuids.length > 0 && live.workers.get(worker)?.cordon;
  return [
    (left.length > 0 || !gpus.length) && (staysClosed ? `The host ${workerName(worker)} stays cordoned, so no new lease is granted.` : "New leases are granted again."),
    cordoned.length > 0 && `GPUs with a cordon of their own stay cordoned: ${cordoned.map(({ uuid }) => placeOf(uuid)).join(", ")}.`,
    faulty.length > 0 && `Unhealthy GPUs get no new lease until their repair and a reset: ${faulty.map(({ uuid, health }) => `${placeOf(uuid)} (${lower(health)})`).join(", ")}. After the repair: leasehold gpu reset-health ${faulty.map(({ uuid }) => placeOf(uuid)).join(" ")}`,
  ].filter(Boolean);
}

function uncordon(worker, uuids) {
  const what = uuids.length ? uuids.map(placeOf).join(", ") : workerName(worker);
  confirm({ title: `Uncordon ${what}`, verb: "Uncordon", effects: () => effectsOfUncordon(worker, uuids), action: { action: "uncordon", worker, gpu_uuids: uuids } });
}

function drain(worker) {
  const reason = reasonField();
  const before = holdersOf(worker);
  confirm({
    title: `Drain ${worker.name}`, verb: "Drain", isDanger: true,
    effects: () => effectsOfDrain(worker, before),
    extra: h("div", { class: "field" }, h("label", { for: "reason" }, "Reason"), reason),
    plans: () => plansOfDrain(worker),
    action: () => ({ action: "drain", worker: worker.worker_id, reason: reason.value }),
  });
}

function effectOfCancellation({ isDeleted, state }) {
  if (isDeleted) return "The command was deleted: there is nothing to cancel.";
  if (CONCLUDED.has(state)) return `The command has ended (${lower(state)}): there is nothing to cancel.`;
  if (state === "PENDING") return "The command was not sent: it ends at once.";
  if (state === "UNKNOWN") return "The host is out of contact: the cancellation is requested from its worker once the host returns. The operation may have ended by then.";
  return "The worker rolls the operation back once its present step has ended. Past the point of no return, the operation goes on.";
}

function titleOfCancellation(command) {
  return `Cancel the ${operationOf(command)}: ${targetOf(command)}`;
}

function cancel(command) {
  confirm({
    title: () => titleOfCancellation(command), verb: "Cancel the command", isDanger: true,
    subjects: { kind: "command", entries: [command] },
    effects: (latest) => [effectOfCancellation(latest), h("code", {}, command.command_id)], isSenseless: ({ isDeleted, state }) => isDeleted || CONCLUDED.has(state),
    action: { action: "cancel", command: command.command_id },
  });
}

const lead = (text) => text && h("p", { class: "muted" }, text);

function picture(pairs) {
  return pairs.length > 0 && h("div", { class: "move-picture" }, pairs.slice(0, 16).map(([from, to]) => h("span", {}, from, h("span", { class: "muted", "aria-label": "to" }, "→"), to)));
}
