// All workloads: those that go on come live, and ended ones by the page.
import { announce, append, h, replace, setText } from "/static/dom.js";
import { age } from "/static/ages.js";
import { glyph } from "/static/glyphs.js";
import { Listing } from "/static/listing.js";
import { areOld, awaitsNames, live, onChange, placeOf, workerName } from "/static/live.js";
import { count, ENDED, parkedText, stateText } from "/static/words.js";

const LIMIT = 1000; // rows of the table

export function show(main) {
  const search = h("input", { type: "search", placeholder: "Filter: name, owner, host, state", "aria-label": "Filter workloads" });
  const counts = h("div", { class: "counts" });
  const body = h("tbody", {});
  const more = h("button", { type: "button", onclick: () => loadMore() }, "Show older ones");
  const bound = h("p", { class: "muted", role: "status" });
  const problem = h("p", { class: "box bad", role: "alert", hidden: true });
  const table = h("table", { class: "fitting" }, h("thead", {}, h("tr", {}, ["Workload", "State", "Where", "Owner", "Created"].map((one, at) => h("th", { scope: "col", class: at > 2 ? "lesser" : "" }, one)))), body);
  append(main, [h("div", { class: "head" }, h("h1", {}, "Workloads"), counts, h("div", { class: "spacer" }), search),
    h("div", { class: "page" }, h("div", { class: "card" }, problem, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Workloads" }, table)), bound, h("p", { class: "actions" }, more))]);
  const list = new Listing("/api/workloads", "workloads", "workload_id", () => {
    more.disabled = false;
    setText(problem, list.problem);
    problem.hidden = !list.problem;
    draw();
  });
  let isScheduled = false;

  function loadMore() {
    more.disabled = true;
    list.load(!list.token);
  }

  // Returns the number of workloads that match the filter.
  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const [key, one] of live.workloads) list.entries.set(key, one);
    const all = [...list.entries.values()].filter((one) => {
      const text = `${one.name}\n${one.owner ?? ""}\n${workerName(one.worker_id)}\n${one.status?.state ?? ""}\n${stateText(one)}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    all.sort((a, b) => ENDED.has(a.status?.state) - ENDED.has(b.status?.state) || b.create_time - a.create_time);
    const going = all.filter((one) => !ENDED.has(one.status?.state)).length;
    replace(counts, list.pages > 0 && h("span", {}, h("b", {}, String(going)), "not ended"));
    replace(body, all.slice(0, LIMIT).map(row));
    const isFull = all.length > LIMIT || (all.length === LIMIT && Boolean(list.token));
    setText(bound, isFull ? `${count(LIMIT, "workload")} are shown: those that have not ended, then the latest ones.` : "");
    more.hidden = !list.problem && (isFull || !list.token);
    setText(more, list.token ? "Show older ones" : "Try again");
    if (!all.length) replace(body, h("tr", {}, h("td", { colspan: "5", class: "muted" }, words.length && awaitsNames() ? "No workload matches yet." : words.length ? `No workload matches${list.token ? " among the loaded ones: show older ones" : ""}.` : !problem.hidden ? "The workloads are not shown." : list.isLoading ? "Loading…" : "No workload yet: start one with `leasehold run`.")));
    return all.length;
  }

  function row(one) {
    const status = one.status ?? {};
    const parked = parkedText(one);
    const gpus = status.lease?.gpu_uuids ?? [];
    const where = gpus.length ? (live.isLoading ? count(gpus.length, "GPU") : gpus.map(placeOf).join(", ")) : parked ? `${workerName(one.worker_id)}: ${parked}` : workerName(one.worker_id);
    return h("tr", {}, h("td", {}, h("a", { href: `/workloads/${encodeURIComponent(one.workload_id)}` }, one.name)),
      h("td", {}, glyph(status.state), stateText(one), one.out_of_contact ? h("span", { class: "muted" }, " (last known)") : ""),
      h("td", {}, where), h("td", { class: "lesser" }, one.owner ?? ""), h("td", { class: "nowrap muted lesser" }, age(one.create_time)));
  }

  const end = onChange((changes) => {
    if (areOld(changes, "workload")) list.renew();
    if (isScheduled || !["workload", "gpu", "state"].some((kind) => changes.has(kind))) return;
    isScheduled = true;
    setTimeout(() => {
      isScheduled = false;
      draw();
    }, 30);
  });
  search.addEventListener("input", () => announce(`Matching workloads: ${draw()}.`));
  loadMore();
  draw();
  return () => {
    end();
    list.end();
  };
}
