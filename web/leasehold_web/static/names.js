// Names of workloads and hosts that the live view lacks, such as ended or deleted ones: from commands, events, lists and the history.
import { ask } from "/static/dom.js";
import { workloadsOf } from "/static/words.js";

const LIMIT = 20000;
const ASKED = 50; // workloads of one request for names
const names = new Map();
const nameless = new Set(); // ids without an answer, such as those of deleted workloads

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

// Asks for the names of the workloads of commands: the list of workloads, which shows also those of others, and then
// the history, which has also deleted ones. Without an answer, they stay unknown.
export async function learnFromHistory(commands) {
  for (const one of commands) learnFromCommand(one);
  const ids = [...new Set(commands.flatMap(workloadsOf))].filter((id) => !names.has(id) && !nameless.has(id));
  for (let at = 0; at < ids.length; at += ASKED) {
    const query = ids.slice(at, at + ASKED).map((id) => `workload=${encodeURIComponent(id)}`).join("&");
    const found = await ask(`/api/names?${query}`).catch(() => ({}));
    for (const [id, name] of Object.entries(found)) learnName(id, name);
  }
  const unknown = commands.filter((one) => workloadsOf(one).some((id) => !names.has(id) && !nameless.has(id)));
  if (!unknown.length) return;
  const start = Math.min(...unknown.map((one) => one.create_time)) - 1;
  const found = await ask(`/api/history?start=${Math.max(0, Math.floor(start))}`).catch(() => null);
  if (!found) return;
  for (const one of found.spans) learnName(one.workload_id, one.workload_name);
  if (nameless.size > LIMIT) nameless.clear();
  for (const id of unknown.flatMap(workloadsOf)) if (!names.has(id)) nameless.add(id);
}
