// The basis of a plan: what its answer depends on. A plan with another basis is outdated.
import { live } from "/static/live.js";
import { held } from "/static/words.js";

// action: a suspend, a restore or a remap; workloads: the latest states of its workloads.
export function basisOf({ action }, workloads) {
  const host = workloads[0].worker_id; // a plan has one host
  const states = workloads.map((one) => [one.status?.state, one.status?.generation, held(one), one.status?.parked_gpu_uuids]);
  const gpus = action === "suspend" ? [] : (live.gpusOf.get(host) ?? []).map((uuid) => live.gpus.get(uuid));
  const worker = live.workers.get(host);
  return JSON.stringify([states, worker?.state, gpus.length > 0 && worker?.cordon, gpus.map((gpu) => [gpu.uuid, gpu.state, gpu.workload_id, gpu.health, gpu.cordon])]);
}
