// The choice of GPUs on the picture: which GPUs can be picked, and what happens when enough are.
import { h } from "/static/dom.js";
import { live } from "/static/live.js";

let pick = null;
const listeners = new Set();

export function picking() {
  return pick;
}

export function onPick(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function tell() {
  for (const listener of [...listeners]) listener();
}

// Begins a choice.
//   worker: the host; sources: the UUIDs that are to be left; needed: how many GPUs; text: what to pick;
//   accepts: whether a GPU can be picked; problem: why the choice is over, or nothing; done: called with the picked
//   UUIDs.
export function beginPick(choice) {
  pick = { picked: [], ...choice };
  tell();
}

export function cancelPick() {
  pick = null;
  tell();
}

export function isCandidate(gpu) {
  return pick !== null && gpu.worker_id === pick.worker && !pick.sources.includes(gpu.uuid) && pick.accepts(gpu);
}

export function pickGpu(uuid) {
  const gpu = live.gpus.get(uuid);
  if (pick.picked.includes(uuid)) pick.picked = pick.picked.filter((one) => one !== uuid);
  else if (gpu && isCandidate(gpu)) pick.picked = [...pick.picked, uuid];
  else return;
  if (pick.picked.length === pick.needed) {
    const { done, picked } = pick;
    pick = null;
    tell();
    done(picked);
    return;
  }
  tell();
}

export function pickBar() {
  if (!pick) return null;
  const have = pick.needed > 1 ? ` (${pick.picked.length} of ${pick.needed} picked)` : "";
  const left = (live.gpusOf.get(pick.worker) ?? []).map((uuid) => live.gpus.get(uuid)).filter((gpu) => isCandidate(gpu) && !pick.picked.includes(gpu.uuid)).length;
  return h("div", { class: "pick-bar", role: "region", "aria-label": "Choice of GPUs" },
    h("p", {}, pick.text + have, left < pick.needed - pick.picked.length && h("b", {}, ` Too few qualify now (${left}): wait until more do, or cancel.`)), h("button", { onclick: cancelPick }, "Cancel"));
}
