// The counts above the fleet: hosts, GPUs by state, parked workloads and waiting claims.
import { h, replace } from "/static/dom.js";
import { isLastKnown } from "/static/fleet_host.js";
import { glyph } from "/static/glyphs.js";
import { live } from "/static/live.js";
import { lower, PARKED, parkedSize } from "/static/words.js";

export function drawCounts(counts) {
  if ((live.refused || live.isLoading) && !live.workers.size) {
    replace(counts); // they are unknown
    return;
  }
  const states = {};
  let unreached = 0; // GPUs of hosts out of contact: nobody can lease them
  for (const gpu of live.gpus.values()) {
    if (isLastKnown(gpu)) unreached += 1;
    else states[gpu.state] = (states[gpu.state] ?? 0) + 1;
  }
  const parked = [...live.workloads.values()].filter((one) => PARKED.has(one.status?.state));
  let waiting = 0;
  for (const worker of live.workers.values()) if (worker.state === "CONNECTED") waiting += worker.pending_claimers ?? 0;
  const entries = [h("span", {}, h("b", {}, live.workers.size.toLocaleString("en")), live.workers.size === 1 ? "host" : "hosts")];
  for (const state of ["LEASED", "FREE", "RESERVED", "CORDONED", "UNHEALTHY", "FOREIGN"]) {
    if (states[state] || state === "LEASED" || state === "FREE") entries.push(h("span", {}, glyph(state), h("b", {}, (states[state] ?? 0).toLocaleString("en")), lower(state)));
  }
  if (unreached) entries.push(h("span", {}, glyph("STALE"), h("b", {}, unreached.toLocaleString("en")), "out of contact"));
  entries.push(h("span", {}, glyph("SUSPENDED"), h("b", {}, parked.length.toLocaleString("en")), parked.length ? `parked, ${parkedSize(parked)}` : "parked"));
  const unknown = [...live.workers.values()].filter((one) => one.gpu_count === undefined).length; // not reported since a restart
  if (unknown) entries.push(h("span", {}, glyph("STALE"), h("b", {}, unknown.toLocaleString("en")), unknown === 1 ? "host with unknown GPUs" : "hosts with unknown GPUs"));
  if (waiting) entries.push(h("span", {}, glyph("PENDING"), h("b", {}, String(waiting)), waiting === 1 ? "claim waits" : "claims wait"));
  replace(counts, ...entries);
}
