// A plan: what would happen, what forbids it, and on what grounds.
import { h } from "/static/dom.js";
import { glyph } from "/static/glyphs.js";
import { placeOf, withNames, workloadName } from "/static/live.js";
import { bytes, count, lower, seconds, UNKNOWN } from "/static/words.js";

const NONE = "–"; // beside tiers that have a value
const RESULTS = { PASSED: "ready", WARNING: "UNHEALTHY", REFUSED: "REJECTED", NOT_CHECKED: "UNKNOWN" };

// verb: the action of the plan, such as "restore".
export function planView(plan, verb = "") {
  const refusals = plan.refusals ?? [];
  const warnings = plan.warnings ?? [];
  const members = plan.members ?? [];
  const moved = members.reduce((sum, one) => sum + Object.values(one.member?.device_memory_bytes ?? {}).reduce((a, b) => a + b, 0), 0);
  return h("div", { class: "plan" },
    refusals.length > 0 && h("div", { class: "box bad", role: "alert" }, h("b", {}, "This would be refused"), h("ul", {}, refusals.map((one) => h("li", {}, withNames(one.message))))),
    !refusals.length && h("div", { class: "box good" }, plan.already_there ? "There is nothing to do: it is in this state already." : `The dry run finds no obstacle. It takes ${plan.estimate ? `about ${seconds(plan.estimate.duration ?? 0)}` : "an unknown time"}${moved ? ` for ${bytes(moved)} of ${count(members.length, "process", "processes")}` : ""}.`),
    !refusals.length && !plan.already_there && plan.estimate?.basis && h("p", { class: "muted estimate" }, `Basis of the estimate: ${withNames(plan.estimate.basis)}.`),
    warnings.length > 0 && h("div", { class: "box warn" }, h("b", {}, "Worth knowing"), h("ul", {}, warnings.map((one) => h("li", {}, withNames(one))))),
    (plan.steps ?? []).length > 0 && h("div", {}, h("h3", {}, "Steps"), h("ol", { class: "steps" }, plan.steps.map((one) => h("li", {}, one)))),
    memory(plan, verb === "restore"),
    (plan.destinations ?? []).length > 0 && h("div", {}, h("h3", {}, "GPUs"), table(["GPU", "Needed", "Will be free"], plan.destinations.map((one) => [placeOf(one.gpu_uuid), bytes(one.needed_bytes), measured("span", bytes(one.free_bytes))]))),
    members.length > 0 && h("details", {}, h("summary", {}, count(members.length, "CUDA process", "CUDA processes")),
      table(["Process", "Workload", "State", "Device memory"], members.map(({ member = {}, workload_id }) => [String(member.pid ?? UNKNOWN), workloadName(workload_id), lower(member.state), bytes(Object.values(member.device_memory_bytes ?? {}).reduce((a, b) => a + b, 0))]))),
    (plan.checks ?? []).length > 0 && h("details", {}, h("summary", {}, count(plan.checks.length, "check")),
      h("ul", { class: "capabilities" }, plan.checks.map((one) => h("li", {}, glyph(RESULTS[one.result] ?? "UNKNOWN"), h("div", {}, `${one.name}: ${lower(one.result)}`, one.detail && measured("p", one.detail)))))));
}

// A text with measurements, which differ between two plans of the same operation.
export const measured = (tag, text) => h(tag, { class: "measured" }, text);

// The text of plans without measurements. Two plans with the same text do the same.
export function lastingText(element) {
  const copy = element.cloneNode(true);
  for (const one of copy.querySelectorAll(".measured")) one.remove();
  return copy.textContent;
}

// The storage tiers of a plan, or its host memory alone.
export function tiersOf({ tiers = [], host_memory: host }) {
  return tiers.length || !host ? tiers : [{ ...host, tier: "HOST" }];
}

// The memory of a plan. A restore needs no room in its tiers, which hold the bytes already. It may need host memory, such
// as for the processes of an image.
function memory({ tiers = [], host_memory: host }, isRestore) {
  const limit = (value) => (value === undefined ? NONE : measured("span", bytes(value)));
  const needed = ({ tier, needed_bytes: size, available_bytes: available }) => [lower(tier), NONE, bytes(size), limit(available)];
  const held = ({ tier, needed_bytes: size }) => [lower(tier), bytes(size), NONE, NONE];
  const told = tiers.filter(({ tier }) => tier !== "HOST" || !isRestore || !host);
  const rows = told.map(isRestore ? held : needed);
  if (host && !told.some(({ tier }) => tier === "HOST")) rows.push(needed({ ...host, tier: "HOST" }));
  // A restore, for example, has no limits: their column would say nothing.
  const shown = ["Tier", "Held", "Needed", "Available"].map((name, at) => [name, at]).filter(([, at]) => rows.some((row) => row[at] !== NONE));
  return rows.length > 0 && h("div", {}, h("h3", {}, "Memory"), table(shown.map(([name]) => name), rows.map((row) => shown.map(([, at]) => row[at]))));
}

function table(head, rows) {
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((one) => h("th", { scope: "col" }, one)))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell)))))));
}
