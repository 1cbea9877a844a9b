// What a user may do: buttons, the dry run of each action, its confirmation, and the command as it goes on.
import { ask, h, keepFocus, replace, requestId, setText } from "/static/dom.js";
import { commandView } from "/static/command_view.js";
import { effectsOfDrain, holdersOf, plansOfDrain } from "/static/drain.js";
import { DryRun } from "/static/dry_run.js";
import { latestEntries } from "/static/latest_entries.js";
import { live, may, mayActOn, mayCancel, onChange, placeOf, readSession, withNames, workerName, workloadName } from "/static/live.js";
import { beginPick } from "/static/picker.js";
import { CONCLUDED, count, ENDED, held, lower, operationOf, PARKED, parkedText, RESTORABLE, workloadsOf } from "/static/words.js";

const ANSWER_MS = 50000; // how long the answer to an action is awaited: a drain makes three calls of up to 15 s each
const BUSY = new Set(["PENDING", "SUSPENDING", "RESTORING", "REMAPPING", "STOPPING"]);
const UNREPEATABLE = new Set(["drain", "cancel"]); // their calls have no id of the request
const CHANGED = " The changed command is a new one: it is carried out even if the earlier one was stored.";

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
  if (gpu.cordon && gpu.state !== "UNSPECIFIED" && !live.workers.get(gpu.worker_id)?.cordon) return [button("Uncordon", () => uncordon(gpu.worker_id, [gpu.uuid]))];
  if (gpu.cordon) return [];
  return [button("Cordon…", () => cordon(gpu.worker_id, [gpu.uuid]))];
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

function suspend(workload) {
  confirm({
    title: `Suspend ${workload.name}`, verb: "Suspend",
    picture: picture(held(workload).map((uuid) => [placeOf(uuid), "parked"])),
    action: { action: "suspend", workload: workload.workload_id },
  });
}

function restoreLead(workload, uuids) {
  if (workload.status?.state === "UNKNOWN") return "Examines each process again, and restores those that the driver can restore.";
  if (workload.status?.state === "SLEEPING") return "On its own GPUs, where its processes still are.";
  if (!formerOf(workload).length) return "It holds no GPU.";
  return uuids.length ? "" : "On its former GPUs if they are free, or else on others of the same chip.";
}

// The GPUs of a restore: those that were picked, those that a sleeper never left, or else those of its plan.
function restorePicture(workload, uuids, plan) {
  const stays = workload.status?.state === "SLEEPING" ? formerOf(workload) : [];
  const planned = (plan?.destinations ?? []).map((one) => one.gpu_uuid);
  const known = [planned, uuids, stays].find((one) => one.length) ?? [];
  return known.length > 0 && picture(known.map((uuid) => [parkedText(workload) || "parked", placeOf(uuid)]));
}

function restore(workload, uuids) {
  confirm({
    title: `Restore ${workload.name}`, verb: "Restore",
    picture: (plan) => restorePicture(workload, uuids, plan),
    lead: restoreLead(workload, uuids),
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
    lead: "Calls the hooks of its restore again.",
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
    done: (uuids) => confirm({
      title: `Move ${workload.name}`, verb: "Move",
      picture: picture(sources.map((uuid, at) => [placeOf(uuid), placeOf(uuids[at])])),
      action: { action: "remap", moves: [{ workload: workload.workload_id, pairs: sources.map((uuid, at) => [uuid, uuids[at]]) }] },
    }),
  }));
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
      confirm({
        title: `Swap ${workload.name} and ${second.name}`, verb: "Swap",
        picture: picture(pairs.flatMap(([from, to]) => [[`${workload.name}: ${placeOf(from)}`, placeOf(to)], [`${second.name}: ${placeOf(to)}`, placeOf(from)]])),
        action: { action: "remap", moves: [{ workload: workload.workload_id, pairs }, { workload: second.workload_id, pairs: pairs.map(([from, to]) => [to, from]) }] },
      });
    },
  }));
}

// How a workload ends on request.
function endOf(state) {
  if (BUSY.has(state)) return "The end depends on the later state: a running process gets SIGTERM first, and a parked state is lost.";
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
  const link = h("a", { href: `/commands/${encodeURIComponent(other.command_id)}`, onclick: () => link.closest("dialog").close() }, operationOf(other));
  return ["Another command of this workload has not ended: ", link, ". The stop is refused until its end."];
}

function effectsOfStop(workload) {
  const state = workload.status?.state;
  const uuids = held(workload);
  if (ENDED.has(state)) return ["The workload has ended."];
  return [
    busyNote(workload),
    endOf(state),
    uuids.length ? `${count(uuids.length, "GPU becomes", "GPUs become")} free: ${uuids.map(placeOf).join(", ")}.` : "It holds no GPU.",
    PARKED.has(state) && "Its parked state is lost.",
  ].filter(Boolean);
}

function stop(workload) {
  const force = h("input", { type: "checkbox", id: "force" });
  confirm({
    title: `Stop ${workload.name}`, verb: "Stop", isDanger: true,
    subject: { kind: "workload", entry: workload },
    effects: effectsOfStop, isSenseless: ({ status }) => ENDED.has(status?.state),
    extra: h("label", { for: "force" }, force, " Kill restored processes even if they can't be suspended first, which can hang the host"),
    action: () => ({ action: "stop", workload: workload.workload_id, force: force.checked }),
  });
}

function reasonField() {
  return h("input", { type: "text", id: "reason", maxlength: "256", required: true, pattern: ".*\\S.*", title: "Say why: blanks alone are no reason.", placeholder: "for example: replaces a fan", autocomplete: "off" });
}

function cordon(worker, uuids) {
  const reason = reasonField();
  const what = uuids.length ? uuids.map(placeOf).join(", ") : workerName(worker);
  confirm({
    title: `Cordon ${what}`, verb: "Cordon",
    effects: ["Leases stay, and no new one is granted.", uuids.length ? "Uncordon puts the GPU back into service." : "The host starts no workload, even without GPUs."],
    extra: h("div", { class: "field" }, h("label", { for: "reason" }, "Reason"), reason),
    action: () => ({ action: "cordon", worker, gpu_uuids: uuids, reason: reason.value }),
  });
}

function uncordon(worker, uuids) {
  const what = uuids.length ? uuids.map(placeOf).join(", ") : workerName(worker);
  confirm({ title: `Uncordon ${what}`, verb: "Uncordon", effects: ["New leases are granted again."], action: { action: "uncordon", worker, gpu_uuids: uuids } });
}

function drain(worker) {
  const reason = reasonField();
  const before = holdersOf(worker);
  confirm({
    title: `Drain ${worker.name}`, verb: "Drain", isDanger: true,
    effects: () => effectsOfDrain(worker, before),
    extra: h("div", { class: "field" }, h("label", { for: "reason" }, "Reason"), reason),
    plans: () => plansOfDrain(worker),
    isStrict: false,
    action: () => ({ action: "drain", worker: worker.worker_id, reason: reason.value }),
  });
}

function effectOfCancellation({ state }) {
  if (CONCLUDED.has(state)) return `The command has ended (${lower(state)}): there is nothing to cancel.`;
  if (state === "PENDING") return "The command was not sent: it ends at once.";
  if (state === "UNKNOWN") return "The host is out of contact: the cancellation is requested from its worker once the host returns. The operation may have ended by then.";
  return "The worker stops the operation and rolls it back. Past the point of no return, the operation goes on.";
}

function titleOfCancellation(command) {
  return `Cancel the ${operationOf(command)}: ${workloadsOf(command).map(workloadName).join(", ") || workerName(command.worker_id)}`;
}

function cancel(command) {
  confirm({
    title: titleOfCancellation(command), verb: "Cancel the command", isDanger: true,
    subject: { kind: "command", entry: command },
    effects: (latest) => [effectOfCancellation(latest), h("code", {}, command.command_id)], isSenseless: ({ state }) => CONCLUDED.has(state),
    action: { action: "cancel", command: command.command_id },
  });
}

function picture(pairs) {
  return h("div", { class: "move-picture" }, pairs.slice(0, 16).map(([from, to]) => h("span", {}, from, h("span", { class: "muted", "aria-label": "to" }, "→"), to)));
}

// What a screen reader says of commands that have ended.
function endText(commands) {
  if (commands.length === 1) return `The ${operationOf(commands[0])} has ended: ${lower(commands[0].state)}.`;
  const states = [...new Set(commands.map((one) => one.state))];
  return commands.length ? `${commands.length} commands have ended: ${states.map((state) => `${commands.filter((one) => one.state === state).length} ${lower(state)}`).join(", ")}.` : "";
}

// A text below the view, until it is closed or another one comes.
export function notice(...parts) {
  document.querySelector(".notice")?.remove();
  const element = h("div", { class: "notice box warn", role: "status" }, h("p", {}, parts), h("button", { type: "button", class: "quiet", onclick: () => element.remove(), "aria-label": "Close the notice" }, "✕"));
  document.body.append(element);
}

// A dialog with the dry run, then with the command.
//   picture: an element, or a function that returns it, of the plan or of nothing; action: what is sent, or a function
//   that returns it; plans: a function that returns further actions to plan; effects: what happens, or a function that
//   returns it and is called again after changes, for an action that has no plan; isStrict: whether the action needs a
//   plan without refusals. With a subject, { kind, entry }, of a workload or a command, effects is a function of its
//   latest state, and isSenseless tells whether that state makes the action senseless.
function confirm({ title, verb, action, picture: drawn, lead, subject, effects, extra, plans, isDanger, isSenseless, isStrict = true }) {
  let id = requestId();
  let again = null; // the sentence on another attempt
  const body = h("div", { class: "body", tabindex: "0", role: "region", "aria-label": "What will happen" });
  const no = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const yes = h("button", { type: "submit", class: isDanger ? "danger" : "primary", disabled: true }, verb);
  const told = h("span", { class: "muted", role: "status" });
  const footer = h("footer", {}, told, no, yes);
  const form = h("form", { method: "dialog" }, h("header", {}, h("h2", { id: "dialog-title" }, title)), body, footer);
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
  const aborted = new AbortController();
  const giveBack = keepFocus();
  let endChanges = null;
  let isSending = false;
  let isRefusedForNow = false; // whether a refusal is shown that another state may end
  let isTouched = false; // whether the user has pressed a key or a pointer in the dialog, or has scrolled it
  document.body.append(dialog);
  dialog.addEventListener("close", () => {
    aborted.abort();
    if (isSending) notice(h("b", {}, title), ": the dialog was closed before the answer. ", mayBeStored());
    endChanges?.();
    dialog.remove();
    giveBack();
  });
  for (const kind of ["keydown", "pointerdown", "wheel"]) {
    dialog.addEventListener(kind, () => {
      isTouched = true;
    }, { passive: true });
  }
  const pictureBox = h("div", {}, typeof drawn === "function" ? drawn() : drawn);
  const effectList = effects && h("ul", { class: "steps" });
  const latest = subject && latestEntries(subject.kind, [subject.entry], redrawEffects);
  const subjectNow = () => subject && latest.of(subject.entry[`${subject.kind}_id`]);
  const drawEffects = () => replace(effectList, (typeof effects === "function" ? effects(subjectNow()) : effects).map((one) => h("li", {}, one)));
  if (effects) drawEffects();
  if (subject) endChanges = latest.end;
  else if (typeof effects === "function") endChanges = onChange((changes) => changes.has("workload") && redrawEffects());
  const parts = [pictureBox, lead && h("p", { class: "muted" }, lead), effectList, extra];
  const plannedActions = plans?.() ?? (typeof action === "object" && ["suspend", "restore", "remap"].includes(action.action) ? [{ name: "", action }] : []);
  const planBox = h("div", {});
  replace(body, ...parts, planBox);
  const dryRun = new DryRun(planBox, {
    signal: aborted.signal,
    onPlan: (plan) => typeof drawn === "function" && replace(pictureBox, drawn(plan)),
    onEnd: (isPossible) => {
      yes.disabled = isStrict && !isPossible;
      if (!yes.disabled) tellCompletion();
    },
  });

  // The focus goes to the button only if the dialog is untouched: the next key of a user who types or scrolls would
  // press the button.
  function tellCompletion() {
    if (!extra && !isTouched && document.activeElement === body) yes.focus();
    else told.textContent = "The dry run is complete.";
  }

  function refuse(error, ...more) {
    if (error.name === "AbortError") return;
    if (error.reason === "NOT_PERMITTED") readSession().catch(() => {}); // the role may have changed
    if (!dialog.isConnected) {
      notice(h("b", {}, title), `: ${withNames(error.message)}. `, ...more);
      return;
    }
    replace(planBox, h("div", { class: "box bad", role: "alert" }, withNames(error.message), more.length > 0 && ". ", ...more));
    yes.disabled = true;
  }

  function redrawEffects() {
    const before = effectList.textContent;
    drawEffects();
    if (effectList.textContent === before) return;
    if (!isSending) told.textContent = "What will happen has changed.";
    forgetRefusal();
    if (plans) dryRun.show(plans());
  }

  // A change may have ended the reason of a refusal.
  function forgetRefusal() {
    if (!isRefusedForNow || isSending || isSenseless?.(subjectNow())) return;
    isRefusedForNow = false;
    replace(planBox);
    yes.disabled = false;
  }

  function mayBeStored() {
    return ["The command may have been stored: see ", h("a", { href: "/commands", onclick: () => dialog.close() }, "Commands"), "."];
  }

  function setSending(isOn) {
    isSending = isOn;
    told.textContent = isOn ? "Sending…" : "";
    no.textContent = isOn ? "Close" : "Cancel";
  }

  form.addEventListener("input", () => {
    id = requestId(); // changed content is another request
    if (again) replace(again, CHANGED);
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (yes.disabled || !form.reportValidity()) return;
    yes.disabled = true;
    isRefusedForNow = false;
    aborted.abort(); // plans that lack are not waited for
    const sent = typeof action === "function" ? action() : action;
    const sentId = id;
    setSending(true);
    try {
      const answer = await ask("/api/action", { body: { ...sent, request_id: sent.action === "cancel" ? "" : sentId }, signal: AbortSignal.timeout(ANSWER_MS) });
      setSending(false);
      if (dialog.isConnected) follow(answer, sent.action === "cancel");
      else {
        const left = (answer.refusals ?? []).map((one) => ` ${one.workload_name} is left as it is: ${withNames(one.error?.message)}.`);
        notice(h("b", {}, title), `: ${count(answer.commands.length, "command is", "commands are")} stored, see `, h("a", { href: "/commands" }, "Commands"), ".", ...left, answer.problem && ` ${withNames(answer.problem)}.`);
      }
    } catch (error) {
      setSending(false);
      // A refusal of the API has a reason. Its message tells if the command may have been stored.
      const isUncertain = !error.reason && (error.status === 0 || error.status >= 500);
      const isRepeatable = isUncertain && !UNREPEATABLE.has(sent.action) && dialog.isConnected;
      again = isRepeatable ? h("span", {}, id === sentId ? ` “${verb}” again is safe: it is not carried out twice.` : CHANGED) : null;
      refuse(error, ...(isUncertain ? [...mayBeStored(), again] : []));
      yes.disabled = !isUncertain && error.reason !== "STORAGE_UNAVAILABLE"; // whose message asks for a repetition
      isRefusedForNow = yes.disabled && error.reason !== "INVALID_ARGUMENT";
      // A changed field may make the action valid.
      form.addEventListener("input", () => {
        yes.disabled = isSending;
      }, { once: true });
    }
  });

  // The commands as they go on, in the place of the plan.
  function follow(answer, isCancellation) {
    const ids = answer.commands.map((command) => command.command_id);
    const refusals = answer.refusals ?? [];
    const draw = () => {
      const commands = ids.map(followed.of);
      const isOver = commands.every((command) => CONCLUDED.has(command.state));
      replace(body, isCancellation && !isOver && h("p", { class: "box warn", role: "status" }, "The cancellation was requested, and waits for the worker."),
        isCancellation && isOver && commands.some((command) => command.state !== "CANCELLED") && h("p", { class: "box warn", role: "status" }, "The command was not cancelled."),
        answer.problem && h("p", { class: "box bad", role: "alert" }, withNames(answer.problem)),
        h("div", {}, commands.map((command) => commandView(command, { hasActions: false }))),
        refusals.length > 0 && h("div", { class: "box warn" }, "Left as they are:", h("ul", {}, refusals.map((one) => h("li", {}, h("b", {}, one.workload_name), `: ${withNames(one.error?.message ?? "")}`)))));
      if (isOver) {
        no.textContent = "Close";
        setText(told, endText(commands));
        endChanges?.();
      }
    };
    yes.remove();
    told.className = "unseen"; // the commands show it
    no.textContent = isCancellation ? "Close" : "Close, and let it go on";
    no.focus();
    endChanges?.();
    const followed = latestEntries("command", answer.commands, draw);
    endChanges = followed.end;
    draw();
  }

  dialog.showModal();
  const field = extra?.querySelector("input[type=text]");
  yes.disabled = isStrict && plannedActions.length > 0;
  dryRun.show(plannedActions);
  if (field || !plannedActions.length) (field ?? yes).focus();
}

