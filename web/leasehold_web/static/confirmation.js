// The dialog of an action: its dry run, its confirmation, and its commands as they go on.
import { commandView } from "/static/command_view.js";
import { ask, h, keepFocus, replace, requestId, setText } from "/static/dom.js";
import { DryRun } from "/static/dry_run.js";
import { latestEntries } from "/static/latest_entries.js";
import { awaitsNames, live, onChange, readSession, withNames } from "/static/live.js";
import { basisOf } from "/static/plan_basis.js";
import { lastingText } from "/static/plan_view.js";
import { CONCLUDED, count, operationOf, outcomeOf } from "/static/words.js";

const ANSWER_MS = 50000; // how long the answer to an action is awaited: a drain makes three calls of up to 15 s each
const PLANNED = new Set(["suspend", "restore", "remap"]); // actions that need a plan
const UNREPEATABLE = new Set(["drain", "cancel"]); // their calls have no id of the request
const CHANGED_VIEW = "What will happen has changed.";
const PLANNED_AGAIN = "The plan is asked for again.";
const CHANGED = " The changed command is a new one: it is carried out even if the earlier one was stored.";

// What a screen reader says of commands that have ended.
function endText(commands) {
  if (commands.length === 1) return `The ${operationOf(commands[0])} has ended: ${outcomeOf(commands[0])}.`;
  const all = commands.map(outcomeOf);
  return all.length ? `${all.length} commands have ended: ${[...new Set(all)].map((outcome) => `${all.filter((one) => one === outcome).length} ${outcome}`).join(", ")}.` : "";
}

// A text below the view, until it is closed or another one comes.
export function notice(...parts) {
  document.querySelector(".notice")?.remove();
  const element = h("div", { class: "notice box warn", role: "status" }, h("p", {}, parts), h("button", { type: "button", class: "quiet", onclick: () => element.remove(), "aria-label": "Close the notice" }, "✕"));
  document.body.append(element);
}

// A dialog with the dry run, then with the command.
//   title: a text, or a function that returns it and is called again after changes, since names may come later;
//   subjects: { kind, entries }, the workloads or the command of the action; picture: a function that returns elements, of
//   the plan or of nothing, and of the latest subjects; action: what is sent, or a function that returns it; plans: a
//   function that returns the actions to plan, each { name, action, basis }, if the action itself has no plan; effects:
//   what happens, or a function of the latest subjects that returns it and is called again after changes; isSenseless:
//   whether the latest subject makes the action senseless.
export function confirm({ title, verb, action, picture, subjects, effects, extra, plans, isDanger, isSenseless }) {
  let id = requestId();
  let again = null; // the sentence on another attempt
  const body = h("div", { class: "body", tabindex: "0", role: "region", "aria-label": "What will happen" });
  const no = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const yes = h("button", { type: "submit", class: isDanger ? "danger" : "primary", disabled: true }, verb);
  const told = h("span", { class: "muted", role: "status" });
  const footer = h("footer", {}, told, no, yes);
  const heading = h("h2", { id: "dialog-title" });
  const titleNow = () => (typeof title === "function" ? title() : title);
  const drawTitle = () => setText(heading, titleNow());
  drawTitle();
  const form = h("form", { method: "dialog" }, h("header", {}, heading), body, footer);
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
  let aborted = new AbortController(); // ends the questions for plans
  const giveBack = keepFocus();
  let endChanges = null;
  let isSending = false;
  let isRefusedForNow = false; // whether a refusal is shown that another state may end
  let isUnanswered = false; // whether a request was sent whose answer never came
  let isBack = false; // whether the contact has returned since
  let isTouched = false; // whether the user has pressed a key or a pointer in the dialog, or has scrolled it
  let hasChanged = false; // whether the dialog has shown something else than before
  let shownPlans = null; // the text of the last complete dry run
  document.body.append(dialog);
  dialog.addEventListener("close", () => {
    aborted.abort();
    if (isSending) notice(h("b", {}, titleNow()), ": the dialog was closed before the answer. ", mayBeStored());
    endChanges?.();
    dialog.remove();
    giveBack();
  });
  for (const kind of ["keydown", "pointerdown", "wheel"]) {
    dialog.addEventListener(kind, () => {
      isTouched = true;
    }, { passive: true });
  }
  // A link leads to another view, which the dialog would cover.
  dialog.addEventListener("click", (event) => {
    const isPlain = !event.metaKey && !event.ctrlKey && !event.shiftKey && !event.altKey;
    if (isPlain && event.target.closest("a[href]")) dialog.close();
  });
  const pictureBox = h("div", { class: "picture" });
  const effectList = h("ul", { class: "steps" });
  const storedBox = h("div", {}); // that an earlier request may have been stored
  const planBox = h("div", {});
  const latest = subjects && latestEntries(subjects.kind, subjects.entries, redraw);
  const subjectsNow = () => (subjects?.entries ?? []).map((one) => latest.of(one[`${subjects.kind}_id`]));
  const drawPicture = (plan) => replace(pictureBox, picture?.(plan, ...subjectsNow()));
  const drawEffects = () => replace(effectList, (typeof effects === "function" ? effects(...subjectsNow()) : effects ?? []).map((one) => h("li", {}, one)));
  const needsPlan = PLANNED.has(action.action);
  const plansNow = () => (needsPlan ? [{ name: "", action, basis: basisOf(action, subjectsNow()) }] : plans?.() ?? []);
  const basisNow = () => JSON.stringify([effectList.textContent, plansNow()]);
  const textOf = (...parts) => parts.map((one) => one.textContent).join("\n");
  drawPicture();
  drawEffects();
  let shownBefore = textOf(pictureBox, effectList); // what is shown without plans
  let basis = live.isLoading ? null : basisNow(); // what the content of the dialog depends on. null: not known yet
  if (subjects || typeof effects === "function") {
    // A change of a workload or GPU is also one of its worker.
    const endWorkers = onChange((changes) => {
      isBack ||= isUnanswered && changes.has("gap");
      if (["worker", "state", "gap"].some((kind) => changes.has(kind))) redraw();
    });
    endChanges = () => {
      endWorkers();
      latest?.end();
    };
  }
  replace(body, pictureBox, effectList, extra, storedBox, planBox);
  let dryRun = newDryRun();

  function newDryRun() {
    return new DryRun(planBox, {
      signal: aborted.signal,
      onPlan: drawPicture,
      onEnd: (isPossible, failed) => {
        yes.disabled = needsPlan && !isPossible && !isUnanswered; // the repetition is safe whatever the plan says
        if (failed === undefined) return;
        if (!failed && !awaitsNames()) {
          const shown = `${pictureBox.textContent}\n${lastingText(planBox)}`;
          hasChanged ||= shownPlans !== null && shown !== shownPlans;
          shownPlans = shown;
        }
        if (yes.disabled) setText(told, hasChanged ? CHANGED_VIEW : "");
        else tellCompletion(failed);
      },
    });
  }

  // The focus goes to the button only if the dialog is untouched: the next key of a user who types or scrolls would
  // press the button. After a change, the user decides anew.
  function tellCompletion(failed) {
    if (!extra && !isTouched && !hasChanged && document.activeElement === body) yes.focus();
    else told.textContent = `${hasChanged ? `${CHANGED_VIEW} ` : ""}${failed ? `${count(failed, "plan")} failed.` : "The dry run is complete."}`;
  }

  function refuse(error, ...more) {
    if (error.name === "AbortError") return;
    if (error.reason === "NOT_PERMITTED") readSession().catch(() => {}); // the role may have changed
    if (!dialog.isConnected) {
      notice(h("b", {}, titleNow()), `: ${withNames(error.message)}. `, ...more);
      return;
    }
    replace(storedBox);
    replace(planBox, h("div", { class: "box bad", role: "alert" }, withNames(error.message), more.length > 0 && ". ", ...more));
    yes.disabled = true;
  }

  // Shows the latest state. Returns whether the content has changed. A plan of an earlier state permits no action.
  function redraw() {
    drawTitle();
    if (live.isLoading) return false; // parts of the state are missing
    drawEffects();
    const before = basis;
    basis = basisNow();
    const isAskedAgain = isBack && !isSending;
    if (basis === before && !isAskedAgain) return false;
    drawPicture();
    const former = shownBefore;
    shownBefore = textOf(pictureBox, effectList);
    if (isSending) return true;
    const hadFocus = document.activeElement;
    if (isAskedAgain) {
      isBack = false;
      forgetRefusal();
      replace(storedBox, h("div", { class: "box warn", role: "status" }, mayBeStored(), again));
    }
    if (isRefusedForNow && !isSenseless?.(...subjectsNow())) {
      forgetRefusal(); // a change may have ended its reason
      yes.disabled = false;
    }
    if (before !== null) {
      hasChanged ||= shownBefore !== former;
      const isPlanned = !aborted.signal.aborted && plansNow().length > 0;
      setText(told, hasChanged ? CHANGED_VIEW : isPlanned ? PLANNED_AGAIN : "");
    }
    if (needsPlan && !aborted.signal.aborted) yes.disabled = true;
    dryRun.show(plansNow());
    if (hadFocus === yes || !hadFocus.isConnected) body.focus({ preventScroll: true }); // the user decides anew
    return true;
  }

  // The next dry run shows its plans in the place of the refusal.
  function forgetRefusal() {
    isRefusedForNow = false;
    replace(planBox);
    aborted = new AbortController();
    dryRun = newDryRun();
  }

  function askAgain() {
    body.focus(); // the button goes
    forgetRefusal();
    dryRun.show(plansNow());
  }

  function mayBeStored() {
    return ["The command may have been stored: see ", h("a", { href: "/commands" }, "Commands"), "."];
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
    // The page shows a change one frame late.
    if (redraw() || yes.disabled || !form.reportValidity()) return;
    yes.disabled = true;
    isRefusedForNow = isUnanswered = isBack = false;
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
        notice(h("b", {}, titleNow()), `: ${count(answer.commands.length, "command is", "commands are")} stored, see `, h("a", { href: "/commands" }, "Commands"), ".", ...left, answer.problem && ` ${withNames(answer.problem)}.`);
      }
    } catch (error) {
      setSending(false);
      // A refusal of the API has a reason. Its message tells if the command may have been stored.
      const isUncertain = !error.reason && (error.status === 0 || error.status >= 500);
      const isRepeatable = isUncertain && !UNREPEATABLE.has(sent.action) && dialog.isConnected;
      again = isRepeatable ? h("span", {}, id === sentId ? ` “${verb}” again is safe: it is not carried out twice.` : CHANGED) : null;
      const isCertain = !isUncertain && error.reason !== "STORAGE_UNAVAILABLE"; // whose message asks for a repetition
      isRefusedForNow = isCertain && error.reason !== "INVALID_ARGUMENT";
      const isOutdated = dialog.isConnected && isRefusedForNow && needsPlan; // the state has changed since the plan
      const more = isOutdated ? [h("button", { type: "button", onclick: askAgain }, "Ask again")] : [];
      isUnanswered = isUncertain;
      refuse(error, ...(isUncertain ? [...mayBeStored(), again] : more));
      const hadFocus = document.activeElement === yes || document.activeElement === document.body;
      yes.disabled = isCertain && (isOutdated || !error.isTransient);
      if (hadFocus && dialog.isConnected) (planBox.querySelector("button") ?? body).focus();
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
    const list = h("div", {});
    // These are announced, so they are not made anew.
    replace(body,
      answer.problem && h("p", { class: "box bad", role: "alert" }, withNames(answer.problem)), list,
      refusals.length > 0 && h("div", { class: "box warn" }, "Left as they are:", h("ul", {}, refusals.map((one) => h("li", {}, h("b", {}, one.workload_name), `: ${withNames(one.error?.message ?? "")}`)))));
    const draw = () => {
      drawTitle();
      const commands = ids.map(followed.of);
      const isOver = commands.every((command) => CONCLUDED.has(command.state));
      replace(list, isCancellation && !isOver && h("p", { class: "box warn", role: "status" }, "The cancellation was requested, and waits for the worker."),
        isCancellation && isOver && commands.some((command) => command.state !== "CANCELLED") && h("p", { class: "box warn", role: "status" }, "The command was not cancelled."),
        h("div", {}, commands.map((command) => commandView(command, { hasActions: false }))));
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
  yes.disabled = needsPlan;
  dryRun.show(plansNow());
  if (field) field.focus();
  else if (!isDanger && !needsPlan) yes.focus(); // or else the body has the focus
}

