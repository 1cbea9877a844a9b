// A host of the fleet, as its row shows it: the name, a tile for each GPU, and what is parked beside them.
import { h, replace } from "/static/dom.js";
import { lastKnown } from "/static/drawer.js";
import { glyph } from "/static/glyphs.js";
import { live } from "/static/live.js";
import { isCandidate, picking } from "/static/picker.js";
import { bytes, count, errorText, FAULTY, gib, lower, PARKED, parkedAt } from "/static/words.js";

const HOT_CELSIUS = 85;
export const PARKED_LIMIT = 3; // parked workloads beside a host

// Draws the row of a host.
//   chosen: the UUID of the GPU in the drawer, or null; isNarrow: whether the row is that of a phone.
export function drawHost(element, id, chosen, isNarrow) {
  const worker = live.workers.get(id);
  element.setAttribute("aria-label", `Host ${worker.name}`);
  replace(element, hostName(worker, isNarrow), h("div", { class: "slots" }, (live.gpusOf.get(id) ?? []).map((uuid) => tile(live.gpus.get(uuid), uuid === chosen))), parkedColumn(id));
}

// The workloads beside a host, which no tile shows: parked ones, and faulty ones without GPUs.
export function parkedOf(id) {
  const isBeside = ({ status = {} }) => PARKED.has(status.state) || (FAULTY.has(status.state) && !status.lease?.gpu_uuids?.length);
  return (live.workloadsOf.get(id) ?? []).map((one) => live.workloads.get(one)).filter((one) => one && isBeside(one));
}

function hostName(worker, isNarrow) {
  const notes = [];
  if (worker.state !== "CONNECTED") notes.push(worker.refusal ? `refused: ${worker.refusal}` : lower(worker.state));
  if (worker.cordon) notes.push(`cordoned${worker.cordon.reason ? `: ${worker.cordon.reason}` : ""}`);
  const refusal = (worker.capabilities ?? []).find((one) => one.name === "commands" && !one.available);
  if (refusal) notes.push(`no commands: ${refusal.reason}`);
  if (worker.pending_claimers && worker.state === "CONNECTED") notes.push(`${count(worker.pending_claimers, "claim")} wait${worker.pending_claimers === 1 ? "s" : ""}`);
  const free = worker.gpu_count === undefined ? ["GPUs unknown"] : [`${worker.free_gpu_count ?? 0} of ${worker.gpu_count} free`, lastKnown(worker)];
  const name = live.gpusOf.get(worker.worker_id)?.map((uuid) => live.gpus.get(uuid).name)[0];
  return h("div", { class: "host-name" },
    h("a", { href: `/workers/${encodeURIComponent(worker.worker_id)}` }, glyph(worker.state), h("span", {}, worker.name)),
    h("p", {}, free, !isNarrow && name && ` · ${shortName(name)}`),
    notes.length > 0 && h("p", { class: "note", title: notes.join(", ") }, notes.join(" · ")));
}

function parkedColumn(id) {
  const parked = parkedOf(id);
  if (!parked.length) return h("div", { class: "parked" });
  const shown = parked.length > PARKED_LIMIT + 1 ? parked.slice(0, PARKED_LIMIT) : parked;
  return h("div", { class: "parked" },
    shown.map((workload) => {
      const { tier, size } = PARKED.has(workload.status.state) ? parkedAt(workload) : { tier: "" };
      const where = tier ? `${size === undefined || tier === "discarded" ? "" : `${bytes(size)} · `}${tier.replace(" memory", "")}` : lower(workload.status.state);
      return h("a", { href: `/workloads/${encodeURIComponent(workload.workload_id)}`, title: `${workload.name}: ${lower(workload.status.state)}${tier && `, ${where}`}` },
        glyph(workload.status.state), h("span", { class: "clip" }, workload.name), h("small", {}, where));
    }),
    parked.length > shown.length && h("a", { class: "more", href: `/workers/${encodeURIComponent(id)}` }, `and ${parked.length - shown.length} more`));
}

function tile(gpu, isChosen) {
  const state = gpu.state ?? "UNSPECIFIED";
  const sample = gpu.sample ?? {};
  const share = gpu.memory_total_bytes && sample.memory_used_bytes !== undefined ? sample.memory_used_bytes / gpu.memory_total_bytes : 0;
  const title = gpu.workload_name ?? (state === "UNHEALTHY" ? lower(gpu.health) : lower(state));
  const doing = stateBeside(gpu);
  const load = sample.utilization_percent === undefined ? "–%" : `${sample.utilization_percent}%`;
  const heat = sample.temperature_celsius === undefined ? "–°" : `${sample.temperature_celsius}°`;
  const meter = h("i", {});
  meter.style.transform = `scaleX(${Math.min(1, share).toFixed(3)})`;
  const sick = gpu.health && state !== "UNHEALTHY";
  let class_ = "slot";
  if (isChosen) class_ += " chosen";
  if (isLastKnown(gpu)) class_ += " last-known";
  if (picking()) class_ += pickClass(gpu);
  return h("button", { class: class_, "data-state": state, "data-uuid": gpu.uuid, "aria-label": label(gpu), "aria-expanded": picking() ? null : String(isChosen), tabindex: "-1" },
    h("span", { class: "title" }, glyph(state), h("span", { class: "clip" }, title), doing && glyph(doing.mark), (sick || (gpu.cordon && state === "LEASED")) && glyph(sick ? "UNHEALTHY" : "CORDONED")),
    h("span", { class: state === "LEASED" ? "meter" : "meter idle" }, meter),
    h("span", { class: "figures" },
      doing ? h("span", { class: `clip g-${doing.mark}` }, doing.text) : h("span", { class: "beside" }, h("span", { class: sample.temperature_celsius >= HOT_CELSIUS ? "hot" : "" }, heat), h("span", { class: "load" }, load)),
      h("span", { class: "memory" }, h("b", {}, gib(sample.memory_used_bytes)), `/${gib(gpu.memory_total_bytes)}`)));
}

// Whether its host is out of contact.
export function isLastKnown(gpu) {
  return live.workers.get(gpu.worker_id)?.state !== "CONNECTED";
}

// The mark and the text of the state or error of the workload on a GPU. Undefined: it runs without an error, or is unknown.
function stateBeside(gpu) {
  const { state, error } = live.workloads.get(gpu.workload_id)?.status ?? {};
  if (state !== "RUNNING") return state && { mark: state, text: lower(state) };
  return error && { mark: "ERROR", text: errorText(error) };
}

function pickClass(gpu) {
  const pick = picking();
  if (pick.sources.includes(gpu.uuid)) return " source";
  if (pick.picked.includes(gpu.uuid)) return " picked";
  return isCandidate(gpu) ? " candidate" : "";
}

function label(gpu) {
  const sample = gpu.sample ?? {};
  const doing = stateBeside(gpu);
  const parts = [`GPU ${gpu.slot ?? 0} of ${live.workers.get(gpu.worker_id)?.name}`, lower(gpu.state)];
  if (gpu.workload_name) parts.push(`workload ${gpu.workload_name}${doing ? `${doing.mark === "ERROR" ? " running," : ""} ${doing.text}` : ""}`);
  if (isLastKnown(gpu)) parts.push("last known");
  if (gpu.health) parts.push(`health ${lower(gpu.health)}`);
  if (gpu.cordon && gpu.state !== "CORDONED") parts.push("cordoned");
  parts.push(sample.memory_used_bytes === undefined ? "memory unknown" : `${bytes(sample.memory_used_bytes)} of ${bytes(gpu.memory_total_bytes)}`);
  if (sample.utilization_percent !== undefined) parts.push(`${sample.utilization_percent} percent busy`);
  if (sample.temperature_celsius !== undefined) parts.push(`${sample.temperature_celsius} degrees`);
  if (picking()) parts.push(picking().picked.includes(gpu.uuid) ? "picked" : isCandidate(gpu) ? "can be picked" : "can't be picked");
  return parts.join(", ");
}

// The model without what all of them share.
function shortName(name) {
  return name.replace(/^(NVIDIA|Tesla)\s+/i, "").replace(/\s+(HBM\d?e?|PCIe|SXM\d?)\b.*$/i, "");
}
