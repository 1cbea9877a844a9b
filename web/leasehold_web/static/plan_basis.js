// The basis of a plan: what its answer depends on. A plan with another basis is outdated.
import { live } from "/static/live.js";
import { held } from "/static/words.js";

// A suspend, a restore or a remap, and the latest states of its workloads. Without named GPUs, a restore takes any.
export function basisOf({ action, gpu_uuids: targets = [], moves = [] }, workloads) {
  const host = workloads[0].worker_id; // a plan has one host
  const states = workloads.map((one) => [one.status?.state, one.status?.generation, held(one), one.status?.parked_gpu_uuids]);
  const named = [...targets, ...moves.flatMap(({ pairs }) => pairs.flat())];
  const uuids = named.length ? named : live.gpusOf.get(host) ?? [];
  const gpus = action === "suspend" ? [] : uuids.map((uuid) => live.gpus.get(uuid)).filter(Boolean);
  const worker = live.workers.get(host);
  return JSON.stringify([states, worker?.state, gpus.length > 0 && worker?.cordon, gpus.map((gpu) => [gpu.uuid, gpu.state, gpu.workload_id, gpu.health, gpu.cordon])]);
}
