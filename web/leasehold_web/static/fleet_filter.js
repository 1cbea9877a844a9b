// The filter of the fleet.
import { live } from "/static/live.js";
import { ENDED, PARKED, stateText } from "/static/words.js";

// Whether a host, its GPUs or its workloads have all words.
export function matches(id, words) {
  if (!words.length) return true;
  const worker = live.workers.get(id);
  const texts = [worker.name, worker.host?.hostname, worker.state, worker.cordon && "cordoned"];
  for (const [key, value] of Object.entries(worker.labels ?? {})) texts.push(`${key}=${value}`);
  for (const uuid of live.gpusOf.get(id) ?? []) {
    const gpu = live.gpus.get(uuid);
    texts.push(gpu.name, gpu.state, gpu.workload_name, gpu.health, gpu.cordon && "cordoned");
  }
  for (const one of live.workloadsOf.get(id) ?? []) {
    const workload = live.workloads.get(one);
    if (!ENDED.has(workload.status?.state)) texts.push(workload.name, workload.owner, workload.status?.state, stateText(workload), PARKED.has(workload.status?.state) && "parked");
  }
  const all = texts.filter(Boolean).join("\n").toLowerCase();
  return words.every((word) => all.includes(word));
}
