// The drawer beside the fleet: one GPU, its holder, and what can be done with both.
import { append, h, replace } from "/static/dom.js";
import { gpuActions, hasOwnCordon, workloadActions } from "/static/actions.js";
import { age } from "/static/ages.js";
import { glyph } from "/static/glyphs.js";
import { live, placeOf, workerName } from "/static/live.js";
import { bytes, lower, stateText, UNKNOWN, when } from "/static/words.js";

export function drawerFor(uuid, onClose) {
  const element = h("aside", { class: "drawer", "aria-label": `GPU ${placeOf(uuid)}`, tabindex: "-1" });
  let before = "";
  function update() {
    const gpu = live.gpus.get(uuid);
    if (!gpu) {
      onClose();
      return;
    }
    const workload = live.workloads.get(gpu.workload_id);
    // Rebuilt only when something in it has changed.
    const { state, cordon } = live.workers.get(gpu.worker_id) ?? {};
    const now = JSON.stringify([gpu, workload?.status, state, cordon]);
    if (now === before) return;
    before = now;
    const hadFocus = element.contains(document.activeElement);
    replace(element, ...content(gpu, workload, onClose));
    // The button with the focus may have gone, such as "Uncordon" once there is no cordon.
    if (hadFocus && !element.contains(document.activeElement)) element.querySelector(".close").focus({ preventScroll: true });
  }
  update();
  return { element, update, close: onClose, end: () => element.remove() };
}

// A cordon of the whole host is ended on the page of the host.
function ofHost(gpu) {
  const isOfHost = live.workers.get(gpu.worker_id)?.cordon && !hasOwnCordon(gpu);
  return isOfHost && [", for the whole host ", h("a", { href: `/workers/${encodeURIComponent(gpu.worker_id)}` }, workerName(gpu.worker_id))];
}

// A free GPU whose host is cordoned shows CORDONED, and its own state has not changed then.
function changedAt({ state, since, cordon }) {
  return state === "CORDONED" ? Math.max(since, cordon?.cordon_time ?? 0) : since;
}

function content(gpu, workload, onClose) {
  const sample = gpu.sample ?? {};
  const facts = [
    ["State", [glyph(gpu.state), " ", lower(gpu.state), lastKnown(live.workers.get(gpu.worker_id)), gpu.since ? h("span", { class: "muted" }, ", changed ", age(changedAt(gpu))) : ""]],
    ["Model", gpu.name],
    ["Memory", sample.memory_used_bytes === undefined ? `${UNKNOWN} of ${bytes(gpu.memory_total_bytes)}` : `${bytes(sample.memory_used_bytes)} of ${bytes(gpu.memory_total_bytes)}`],
    ["Utilization", sample.utilization_percent === undefined ? UNKNOWN : `${sample.utilization_percent} %`],
    ["Temperature", sample.temperature_celsius === undefined ? UNKNOWN : `${sample.temperature_celsius} °C`],
    ["Health", gpu.health ? `${lower(gpu.health)}${gpu.health_reason ? `: ${gpu.health_reason}` : ""}` : "no fault known"],
  ];
  if (gpu.asleep_bytes) facts.push(["Asleep", `${bytes(gpu.asleep_bytes)} of sleeping workloads`]);
  if (gpu.cordon) facts.push(["Cordon", [gpu.cordon.reason || "no reason given", gpu.cordon.cordoned_by && `, by ${gpu.cordon.cordoned_by}`, gpu.cordon.cordon_time && [", ", age(gpu.cordon.cordon_time)], ofHost(gpu)]]);
  if (gpu.hold) facts.push(["Hold", `until ${when(gpu.hold.expire_time)}${gpu.hold.held_by ? `, by ${gpu.hold.held_by}` : ""}`]);
  for (const process of gpu.foreign_processes ?? []) {
    const used = sample.foreign_bytes?.[process.pid] ?? process.device_memory_bytes; // a watch tells no change of them
    facts.push(["Foreign process", `${process.pid} ${process.user ?? ""} ${process.command ?? ""} ${used ? bytes(used) : ""}`]);
  }
  facts.push(["UUID", h("code", {}, gpu.uuid)]);
  const parts = [
    h("header", {}, h("h2", {}, placeOf(gpu.uuid)), h("button", { class: "close quiet", onclick: onClose, "aria-label": "Close" }, "✕")),
    list(facts),
    h("div", { class: "actions" }, gpuActions(gpu)),
  ];
  if (workload) {
    parts.push(h("h3", {}, glyph(workload.status?.state), " ", h("a", { href: `/workloads/${encodeURIComponent(workload.workload_id)}` }, workload.name)),
      list([["State", [stateText(workload), lastKnown(live.workers.get(workload.worker_id))]], ["Owner", workload.owner ?? UNKNOWN], ["GPUs", (workload.status?.lease?.gpu_uuids ?? []).map(placeOf).join(", ") || "none"]]),
      h("div", { class: "actions", "data-of": workload.workload_id }, workloadActions(workload)));
  }
  return parts;
}

// A mark behind what a host has told, if the host is out of contact.
export function lastKnown(worker) {
  return worker?.state !== "CONNECTED" && h("span", { class: "muted" }, " (last known)");
}

export function list(facts) {
  const found = h("dl", { class: "facts" });
  for (const [name, value] of facts) append(found, [h("dt", {}, name), h("dd", {}, value)]);
  return found;
}
