// One worker: its host, resources, GPUs, capabilities with reasons, and events.
import { append, ask, h, redraw, showProblem } from "/static/dom.js";
import { workerActions } from "/static/actions.js";
import { age } from "/static/ages.js";
import { lastKnown, list } from "/static/drawer.js";
import { eventsView, merged } from "/static/events_view.js";
import { glyph } from "/static/glyphs.js";
import { awaitsNames, live, onChange } from "/static/live.js";
import { learnName } from "/static/names.js";
import { bytes, ENDED, lower, PARKED, parkedText, stateText, UNKNOWN } from "/static/words.js";

export function show(main, id) {
  const page = h("div", { class: "page" }, h("p", { class: "empty" }, "Loading…"));
  append(main, [page]);
  let found = null;
  let isOver = false;
  let isScheduled = false;

  async function load() {
    try {
      found = await ask(`/api/workers/${encodeURIComponent(id)}`);
      learnName(found.worker.worker_id, found.worker.name);
      if (!isOver) draw();
    } catch (error) {
      const isDeleted = found !== null && error.status === 404;
      if (isDeleted) error.message = `The host ${found.worker.name} was deleted.`;
      if (!isOver && (!found || isDeleted)) showProblem(page, error.message);
      if (isDeleted) leave();
    }
  }

  function leave() {
    isOver = true;
    clearInterval(timer);
    end();
  }

  function draw() {
    // A watch tells no change of free memory, CPU or disk.
    const worker = { ...(live.workers.get(found.worker.worker_id) ?? found.worker), resources: found.worker.resources };
    document.title = `${worker.name} · Leasehold`;
    const scrolled = page.scrollTop;
    redraw(page,
      h("div", { class: "title-line" }, h("h1", {}, glyph(worker.state), worker.name), h("span", { class: "badge" }, lower(worker.state)), worker.cordon && h("span", { class: "badge" }, glyph("CORDONED"), `cordoned${worker.cordon.reason ? `: ${worker.cordon.reason}` : ""}`), h("div", { class: "actions" }, workerActions(worker))),
      h("div", { class: "cards" },
        h("section", { class: "card", "aria-label": "Host" }, h("h2", {}, "Host"), hostFacts(worker)),
        h("section", { class: "card", "aria-label": "Resources" }, h("h2", {}, "Resources"), resources(worker)),
        h("section", { class: "card whole", "aria-label": "GPUs" }, h("h2", {}, "GPUs"), gpus(found, worker)),
        h("section", { class: "card", "aria-label": "Workloads" }, h("h2", {}, "Workloads"), workloads(worker)),
        h("section", { class: "card", "aria-label": "Capabilities" }, h("h2", {}, "Capabilities"), capabilities(worker)),
        h("section", { class: "card", "aria-label": "Events" }, h("h2", {}, "Events"), eventsView(merged(found.events, live.events.values(), (one) => one.worker_id === worker.worker_id)))));
    page.scrollTop = scrolled;
  }

  load();
  const timer = setInterval(() => document.visibilityState === "visible" && load(), 5000);
  const end = onChange((changes) => {
    if (!found || isScheduled) return;
    const key = found.worker.worker_id;
    const hasEvent = [...(changes.get("event") ?? [])].some((one) => live.events.get(one)?.worker_id === key);
    if (!changes.get("worker")?.has(key) && !hasEvent && !changes.has("state")) return;
    isScheduled = true;
    setTimeout(() => {
      isScheduled = false;
      if (!isOver) draw();
    }, 80);
  });
  return leave;
}

function hostFacts(worker) {
  const host = worker.host ?? {};
  const cuda = worker.cuda_version ? `${Math.floor(worker.cuda_version / 1000)}.${Math.floor((worker.cuda_version % 1000) / 10)}` : UNKNOWN;
  const facts = [
    ["Hostname", host.hostname ?? UNKNOWN],
    // A watch tells no new time of a worker in contact, so its last one would look old.
    ["Last report", worker.state === "CONNECTED" ? "in contact" : age(worker.last_seen_time)],
    ["Agent", worker.agent_version ?? UNKNOWN],
    ["Driver", `${worker.driver_version ?? UNKNOWN}, CUDA ${cuda}`],
    ["Kernel", `${host.kernel_release ?? UNKNOWN}, ${host.architecture ?? UNKNOWN}`],
    ["Session", worker.session_encrypted === undefined ? (worker.refusal ? `refused: ${worker.refusal}` : "none") : worker.session_encrypted ? "with TLS" : "without TLS"],
    ["Waiting claims", worker.pending_claimers === undefined ? UNKNOWN : [String(worker.pending_claimers), lastKnown(worker)]],
  ];
  for (const [key, value] of Object.entries(worker.labels ?? {})) facts.push(["Label", `${key}=${value}`]);
  facts.push(["Id", h("code", {}, worker.worker_id)]);
  return list(facts);
}

function resources(worker) {
  const found = worker.resources;
  if (!found) return h("p", { class: "muted" }, "Unknown: the worker has not reported since the coordinator's start.");
  const bar = (...figures) => resource(...figures, lastKnown(worker));
  const cores = (value) => `${(value / 1000).toFixed(1)}`;
  return [
    bar("CPU", found.cpu_millicores_total ?? 0, found.cpu_millicores_free ?? 0, cores, "cores"),
    bar("Host memory", found.memory_total_bytes ?? 0, found.memory_free_bytes ?? 0, bytes, ""),
    bar("Disk", found.disk_total_bytes ?? 0, found.disk_free_bytes ?? 0, bytes, ""),
    worker.gpu_count !== undefined && bar("GPUs", worker.gpu_count, worker.free_gpu_count ?? 0, String, ""),
  ];
}

function resource(name, total, free, text, unit, mark) {
  const fill = h("i", {});
  fill.style.transform = `scaleX(${total ? ((total - free) / total).toFixed(3) : 0})`;
  return h("div", { class: "resource" }, h("p", {}, h("span", {}, name), h("span", { class: "muted" }, `${text(free)} of ${text(total)} ${unit} free`, mark)), h("span", { class: "meter" }, fill));
}

function gpus(found, worker) {
  const rows = found.gpus.map((one) => {
    const gpu = live.gpus.get(one.gpu.uuid);
    const lease = one.lease ?? {};
    const sample = lease.sample ?? {};
    const state = gpu?.state ?? lease.state;
    const name = gpu ? gpu.workload_name : one.workload_name;
    return h("tr", {}, h("td", {}, h("a", { href: `/?gpu=${encodeURIComponent(one.gpu.uuid)}` }, String(one.gpu.slot ?? 0))),
      h("td", { class: "nowrap" }, glyph(state), lower(state), lastKnown(worker)), h("td", {}, name ? h("a", { href: `/workloads/${encodeURIComponent(gpu?.workload_id ?? lease.workload_id)}` }, name) : ""),
      h("td", {}, one.gpu.name), h("td", { class: "nowrap" }, `${bytes(sample.memory_used_bytes)} of ${bytes(one.gpu.memory_total_bytes)}`),
      h("td", {}, sample.utilization_percent === undefined ? UNKNOWN : `${sample.utilization_percent} %`), h("td", {}, sample.temperature_celsius === undefined ? UNKNOWN : `${sample.temperature_celsius} °C`),
      h("td", {}, lease.health && lease.health !== "OK" ? `${lower(lease.health)}${lease.health_reason ? `: ${lease.health_reason}` : ""}` : "no fault known"));
  });
  if (!rows.length) return h("p", { class: "muted" }, "No GPU has been reported since the coordinator's start.");
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of GPUs" }, h("table", {}, h("thead", {}, h("tr", {}, ["Slot", "State", "Workload", "Model", "Memory", "Utilization", "Temperature", "Health"].map((one) => h("th", { scope: "col" }, one)))), h("tbody", {}, rows)));
}

function workloads(worker) {
  const all = (live.workloadsOf.get(worker.worker_id) ?? []).map((id) => live.workloads.get(id)).filter((one) => !ENDED.has(one.status?.state));
  if (!all.length) return h("p", { class: "muted" }, awaitsNames() ? "Loading…" : live.isLoading ? "The workloads are not shown." : "No workload.");
  return h("table", {}, h("tbody", {}, all.map((one) => {
    return h("tr", {}, h("td", {}, h("a", { href: `/workloads/${encodeURIComponent(one.workload_id)}` }, one.name)), h("td", { class: "nowrap" }, glyph(one.status?.state), stateText(one), lastKnown(worker)), h("td", {}, PARKED.has(one.status?.state) ? parkedText(one) : one.owner ?? ""));
  })));
}

function capabilities(worker) {
  return h("ul", { class: "capabilities" }, (worker.capabilities ?? []).map((one) => h("li", {}, glyph(one.available ? "ready" : "refused"), h("div", {}, one.name.replaceAll("_", " "), one.available ? h("span", { class: "unseen" }, ": available") : h("p", {}, one.reason || "not available")))));
}
