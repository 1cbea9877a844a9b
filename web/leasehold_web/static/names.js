// Names of workloads that the live view lacks, such as ended ones: from commands, events and the history.
import { ask } from "/static/dom.js";
import { workloadsOf } from "/static/words.js";

const LIMIT = 20000;
const names = new Map();

export function knownName(id) {
  return names.get(id);
}

export function learnName(id, name) {
  if (!id || !name) return;
  names.delete(id);
  names.set(id, name);
  if (names.size > LIMIT) names.delete(names.keys().next().value);
}

// A command that started a workload has its name.
export function learnFromCommand(command) {
  learnName(command.workload_id, command.operation?.run?.name);
}

// Asks the history for the workloads of commands whose names are unknown. Without an answer they stay so.
export async function learnFromHistory(commands) {
  for (const one of commands) learnFromCommand(one);
  const unknown = commands.filter((one) => workloadsOf(one).some((id) => !names.has(id)));
  if (!unknown.length) return;
  const start = Math.min(...unknown.map((one) => one.create_time)) - 1;
  const found = await ask(`/api/history?start=${Math.max(0, Math.floor(start))}`).catch(() => null);
  for (const one of found?.spans ?? []) learnName(one.workload_id, one.workload_name);
}
