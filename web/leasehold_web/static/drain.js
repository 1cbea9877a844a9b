// What a drain does to the workloads of a host, by the latest state.
import { live } from "/static/live.js";
import { basisOf } from "/static/plan_basis.js";
import { count, ENDED, held } from "/static/words.js";

const PLANS_LIMIT = 32; // plans of a drain, each of which asks the worker

// The workloads that hold GPUs of a host now, the oldest first.
export function holdersOf(worker) {
  return (live.workloadsOf.get(worker.worker_id) ?? []).map((id) => live.workloads.get(id)).filter((one) => one && held(one).length && !ENDED.has(one.status?.state))
    .sort((a, b) => (a.create_time ?? 0) - (b.create_time ?? 0));
}

// The coordinator suspends the workloads that hold GPUs at the confirmation.
function changeOfHolders(before, after) {
  const others = (some, known) => some.filter((one) => !known.some((other) => other.workload_id === one.workload_id)).map((one) => one.name).join(", ");
  const added = others(after, before);
  const gone = others(before, after);
  return (added || gone) && `The list has changed since this dialog was opened.${added && ` New: ${added}.`}${gone && ` Without GPUs now: ${gone}.`}`;
}

// before: the holders at the opening of the dialog.
export function effectsOfDrain(worker, before) {
  const holders = holdersOf(worker);
  return [
    `${worker.name} is cordoned first, so that nothing takes the freed GPUs.`,
    holders.length ? `Then ${count(holders.length, "workload with GPUs is", "workloads with GPUs are")} suspended, the oldest first.` : "No workload holds a GPU of it.",
    changeOfHolders(before, holders),
    holders.length > PLANS_LIMIT && `${PLANS_LIMIT} of them have a plan below, and ${holders.length - PLANS_LIMIT} more are without a plan here.`,
  ].filter(Boolean);
}

// The actions of a drain that have a plan.
export function plansOfDrain(worker) {
  return holdersOf(worker).slice(0, PLANS_LIMIT).map((one) => {
    const action = { action: "suspend", workload: one.workload_id };
    return { name: one.name, action, basis: basisOf(action, [one]) };
  });
}
