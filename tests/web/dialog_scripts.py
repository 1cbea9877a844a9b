"""Scripts that open a dialog of the page, for the tests of dialogs."""

from typing import Final

BESIDE: Final = """async () => {
  const { workloadActions } = await import("/static/actions.js");
  const { live } = await import("/static/live.js");
  workloadActions(live.workloads.get("w-1")).find((one) => one.textContent === "Stop…").click();
}"""

CANCEL: Final = """async () => {
  const { commandActions } = await import("/static/actions.js");
  const { live } = await import("/static/live.js");
  commandActions(live.commands.get("c-1"))[0].click();
}"""

DRAIN: Final = """async (number) => {
  const { workerActions } = await import("/static/actions.js");
  const { live } = await import("/static/live.js");
  while (live.isLoading) await new Promise((done) => setTimeout(done, 20)); // the stream replaces the view
  const ids = Array.from({ length: number }, (_, at) => `w-${at}`);
  const status = { state: "RUNNING", lease: { gpu_uuids: ["GPU-1"] } };
  for (const id of ids) live.workloads.set(id, { workload_id: id, name: id, status });
  live.workloadsOf.set("worker-a", ids);
  workerActions({ worker_id: "worker-a", name: "alpha" })[1].click();
}"""

SUSPEND: Final = """async () => {
  const { workloadActions } = await import("/static/actions.js");
  const status = { state: "RUNNING", lease: { gpu_uuids: ["GPU-1"] } };
  workloadActions({ workload_id: "w-1", name: "one", status })[0].click();
}"""
