// Numbers, times and names as text. An unknown value is the word, and never zero.
import { now } from "/static/server_time.js";

export const UNKNOWN = "unknown";

export function bytes(value) {
  if (value === undefined) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function rate(value, duration) {
  return duration ? `${bytes(value / duration)}/s` : UNKNOWN;
}

export function gib(value) {
  if (value === undefined) return "?";
  const found = value / 2 ** 30;
  return found >= 10 || found === 0 ? String(Math.round(found)) : found.toFixed(1);
}

export function seconds(value) {
  if (value === undefined) return UNKNOWN;
  if (value < 0.001) return "< 1 ms";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${(value / 3600).toFixed(1)} h`;
  return `${(value / 86400).toFixed(1)} d`;
}

export function ago(time) {
  if (time === undefined) return UNKNOWN;
  const past = Math.max(0, (now() - time) / 1000);
  if (past < 60) return `${Math.round(past)} s ago`;
  if (past < 7200) return `${Math.round(past / 60)} min ago`;
  if (past < 172800) return `${Math.round(past / 3600)} h ago`;
  return `${Math.round(past / 86400)} d ago`;
}

const clockFormat = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const dayFormat = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "short", day: "numeric" });

function clock(time) {
  return clockFormat.format(time);
}

// A time with its date, unless it is of today.
export function when(time) {
  return new Date(time).toDateString() === new Date(now()).toDateString() ? clock(time) : moment(time);
}

export function moment(time) {
  return time === undefined ? UNKNOWN : `${dayFormat.format(time)}, ${clockFormat.format(time)}`;
}

export function lower(state) {
  return (state || "unspecified").toLowerCase().replaceAll("_", " ");
}

export function count(number, one, many = `${one}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
}

const OPERATIONS = { remap: "move", reset_gpu_health: "reset of health", delete_checkpoints: "deletion of checkpoints", release_hold: "release of a hold" };

// The operation of a command, in the words of its buttons.
export function operationOf(command) {
  const kind = Object.keys(command.operation ?? {})[0] ?? "operation";
  if (kind === "remap" && (command.operation.remap.moves ?? []).length > 1) return "move of several";
  return OPERATIONS[kind] ?? kind;
}

// Who requested a command, and for which user.
export const actorOf = ({ actor = "", on_behalf_of: user }) => `${actor}${user ? ` for ${user}` : ""}`;

// How a command has ended, or how far it is.
export function outcomeOf(command) {
  return command.result?.already_there ? "nothing to do" : lower(command.state);
}

// Ids of the workloads of a command. A remap has all of them in its moves.
export function workloadsOf(command) {
  const moves = command.operation?.remap?.moves ?? [];
  return moves.length ? moves.map((move) => move.workload_id) : command.workload_id ? [command.workload_id] : [];
}

// UUIDs of the GPUs that are the target of a command. Empty: a workload or a whole host is the target.
export function gpusOf({ operation = {} }) {
  return (operation.cordon ?? operation.uncordon ?? operation.reset_gpu_health)?.gpu_uuids ?? [];
}

export const ENDED = new Set(["EXITED", "FAILED", "RELEASED"]);
export const PARKED = new Set(["SUSPENDED", "CHECKPOINTED", "SLEEPING", "STOPPED"]);
// In UNKNOWN, the worker examines each process again.
export const RESTORABLE = new Set([...PARKED, "UNKNOWN"]);
export const FAULTY = new Set(["WEDGED", "UNKNOWN"]);
export const CONCLUDED = new Set(["SUCCEEDED", "FAILED", "REJECTED", "CANCELLED", "EXPIRED"]);

// The GPUs that a workload holds.
export const held = (workload) => workload.status?.lease?.gpu_uuids ?? [];

const ERRORS = { UNKNOWN_GPU: "lost a GPU" };

// The error of a running workload: the words of its reason, unless they say something else beside a workload.
export const errorText = ({ reason }) => ERRORS[reason] ?? lower(reason);

// The state of a workload, and of a running one whether it is ready, or which error it has, such as failed hooks.
export function stateText({ status = {} }) {
  if (status.yielded && PARKED.has(status.state)) return `${lower(status.state)} (yielded)`;
  if (status.state !== "RUNNING") return lower(status.state);
  if (status.error) return `running, ${errorText(status.error)}`;
  return status.ready_time ? "running and ready" : "running, not ready";
}

// The bytes of several parked workloads.
export function parkedSize(workloads) {
  const known = workloads.map((one) => parkedAt(one).size).filter((size) => size !== undefined);
  const unknown = workloads.length - known.length;
  if (!known.length && unknown) return "size unknown";
  const sum = bytes(known.reduce((all, size) => all + size, 0));
  return unknown ? `${sum} and ${unknown} of unknown size` : sum;
}

// An eviction policy as the command line writes it. A part that is missing has its default.
export function policyText(policy = {}) {
  const word = (value) => value.toLowerCase();
  const process = policy.process_strategy ?? "CUDA_SUSPEND";
  const limit = policy.escalate_to && policy.escalate_to !== process ? `, up to ${word(policy.escalate_to)}` : "";
  return `${word(policy.weight_strategy ?? "RETAIN")}+${word(process)}${limit}`;
}

// A sleeping workload keeps its processes. Its weights are where their strategy left them.
function asleepAt(status) {
  switch (status.parked_by?.weight_strategy) {
    case "OFFLOAD":
      return { tier: "host memory", size: status.parked_bytes };
    case "DISCARD":
      return { tier: "discarded", size: 0 };
    default:
      return { tier: status.parked_by ? "device memory" : "", size: undefined };
  }
}

// The place of a parked workload, such as "1.0 GiB in host memory". Empty: not shown.
export function parkedText(workload) {
  const { size, tier } = parkedAt(workload);
  if (tier === "discarded") return "weights discarded";
  return tier && `${size === undefined ? "" : `${bytes(size)} `}${tier === "disk" ? "on" : "in"} ${tier}`;
}

// Where the bytes of a parked workload are, and how many. Of others' workloads, only the state is shown.
export function parkedAt(workload) {
  const status = workload.status ?? {};
  switch (status.state) {
    case "SUSPENDED":
      return { tier: "host memory", size: status.parked_bytes };
    case "CHECKPOINTED":
      return { tier: "disk", size: status.disk_bytes };
    case "STOPPED":
      return { tier: "disk", size: status.disk_bytes ?? (status.park_time && !status.checkpoint_id ? 0 : undefined) };
    case "SLEEPING":
      return asleepAt(status);
    default: // members of a WEDGED workload may be suspended
      return { tier: status.parked_bytes === undefined ? "" : "host memory", size: status.parked_bytes };
  }
}
