// All workloads: those that go on come live, and ended ones by the page.
import { append, ask, h, replace } from "/static/dom.js";
import { glyph } from "/static/glyphs.js";
import { live, onChange, placeOf, workerName } from "/static/live.js";
import { ago, bytes, ENDED, lower, parkedAt } from "/static/words.js";

export function show(main) {
  const search = h("input", { type: "search", placeholder: "Filter: name, owner, host, state", "aria-label": "Filter workloads" });
  const counts = h("div", { class: "counts", role: "status" });
  const body = h("tbody", {});
  const more = h("button", { type: "button", onclick: () => load() }, "Show older ones");
  const problem = h("p", { class: "box bad", role: "alert", hidden: true });
  const table = h("table", { class: "fitting" }, h("thead", {}, h("tr", {}, ["Workload", "State", "Where", "Owner", "Created"].map((one, at) => h("th", { scope: "col", class: at > 2 ? "lesser" : "" }, one)))), body);
  append(main, [h("div", { class: "head" }, h("h1", {}, "Workloads"), counts, h("div", { class: "spacer" }), search),
    h("div", { class: "page" }, h("div", { class: "card" }, problem, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Workloads" }, table)), h("p", { class: "actions" }, more))]);
  const listed = new Map();
  let token = "";
  let isScheduled = false;

  async function load() {
    more.disabled = true;
    try {
      const page = await ask(`/api/workloads?page_token=${encodeURIComponent(token)}`);
      for (const one of page.workloads) listed.set(one.workload_id, one);
      token = page.next_page_token;
      more.hidden = !token;
      problem.hidden = true;
    } catch (error) {
      replace(problem, error.message);
      problem.hidden = false;
    }
    more.disabled = false;
    draw();
  }

  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const all = [...new Map([...listed, ...live.workloads]).values()].filter((one) => {
      const text = `${one.name}\n${one.owner ?? ""}\n${workerName(one.worker_id)}\n${one.status?.state ?? ""}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    all.sort((a, b) => ENDED.has(a.status?.state) - ENDED.has(b.status?.state) || b.create_time - a.create_time);
    const going = all.filter((one) => !ENDED.has(one.status?.state)).length;
    replace(counts, (all.length > 0 || problem.hidden) && h("span", {}, h("b", {}, String(going)), "not ended"));
    replace(body, all.slice(0, 1000).map(row));
    if (!all.length) replace(body, h("tr", {}, h("td", { colspan: "5", class: "muted" }, words.length ? "No workload matches." : !problem.hidden ? "The workloads are not shown." : "No workload yet: start one with `leasehold run`.")));
  }

  function row(one) {
    const status = one.status ?? {};
    const { size, tier } = parkedAt(one);
    const gpus = status.lease?.gpu_uuids ?? [];
    const where = gpus.length ? gpus.map(placeOf).join(", ") : tier ? `${workerName(one.worker_id)}: ${size === undefined ? "" : `${bytes(size)} in `}${tier}` : workerName(one.worker_id);
    return h("tr", {}, h("td", {}, h("a", { href: `/workloads/${encodeURIComponent(one.workload_id)}` }, one.name)),
      h("td", {}, glyph(status.state), lower(status.state), status.ready_time && status.state === "RUNNING" ? " and ready" : "", one.out_of_contact ? h("span", { class: "muted" }, " (last known)") : ""),
      h("td", {}, where), h("td", { class: "lesser" }, one.owner ?? ""), h("td", { class: "nowrap muted lesser" }, ago(one.create_time)));
  }

  const end = onChange((changes) => {
    if (isScheduled || !(changes.has("workload") || changes.has("gpu"))) return;
    isScheduled = true;
    setTimeout(() => {
      isScheduled = false;
      draw();
    }, 30);
  });
  search.addEventListener("input", draw);
  load();
  return end;
}
