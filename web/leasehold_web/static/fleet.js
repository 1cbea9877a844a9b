// The fleet: each host a row, each GPU a tile. Only the rows in sight exist, whatever the number of hosts.
import { announce, append, ask, h, replace } from "/static/dom.js";
import { notice } from "/static/confirmation.js";
import { drawerFor } from "/static/drawer.js";
import { drawCounts } from "/static/fleet_counts.js";
import { matches } from "/static/fleet_filter.js";
import { drawHost, PARKED_LIMIT, parkedOf } from "/static/fleet_host.js";
import { live, onChange, setSample } from "/static/live.js";
import { picking, pickGpu, onPick, pickBar, cancelPick } from "/static/picker.js";

const SAMPLE_MS = 5000;
const SPARE_ROWS = 3;
const TILE = 62;
const GAP = 6;
const COUNT_MS = 30; // how long changes are gathered before they are counted
const BY_NAME = new Intl.Collator("en", { numeric: true }); // much faster than localeCompare, which looks its rules up each time

export function show(main) {
  const search = h("input", { type: "search", placeholder: "Filter: host, workload, state", "aria-label": "Filter by host, workload, owner or state" });
  const counts = h("div", { class: "counts" });
  const height = h("div", { class: "height" });
  const list = h("div", { class: "fleet", role: "group", "aria-label": "Hosts and their GPUs" }, height);
  const empty = h("div", { class: "empty", hidden: true });
  const split = h("div", { class: "split" }, list);
  const bar = h("div", {});
  append(main, [h("div", { class: "head" }, h("h1", {}, "Fleet"), counts, h("div", { class: "spacer" }), search), bar, empty, split]);

  let hosts = []; // ids in the order of names, as filtered
  let tops = [0]; // the top of each row, and the height of all
  let isListStale = true;
  let columns = 8;
  let chosen = null; // the UUID of the GPU in the drawer
  let drawer = null;
  const rows = new Map(); // the rows that exist, by id of the worker

  const isNarrow = () => list.clientWidth <= 720;
  const isMedium = () => list.clientWidth <= 1100;

  function rowHeight(id) {
    const lines = Math.max(1, Math.ceil((live.gpusOf.get(id)?.length ?? 0) / columns));
    const tiles = lines * TILE + (lines - 1) * GAP;
    const parked = Math.min(parkedOf(id).length, PARKED_LIMIT + 1);
    if (isNarrow()) return 20 + 24 + 8 + tiles + (parked ? 4 + parked * 32 : 0) + 1;
    if (isMedium()) return 20 + Math.max(tiles, 60) + (parked ? 16 + 30 * Math.ceil(parked / 3) : 0) + 1;
    return 20 + Math.max(tiles, 60, parked * 30) + 1;
  }

  function listHosts() {
    isListStale = false;
    columns = isNarrow() ? 4 : 8;
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    hosts = [...live.workers.values()].filter((one) => one.worker_id === picking()?.worker || matches(one.worker_id, words)).sort((a, b) => BY_NAME.compare(a.name, b.name)).map((one) => one.worker_id);
    tops = [0];
    for (const id of hosts) tops.push(tops[tops.length - 1] + rowHeight(id));
    height.style.height = `${tops[tops.length - 1]}px`;
    const isEmpty = !hosts.length;
    empty.hidden = !isEmpty;
    split.hidden = isEmpty;
    split.style.display = isEmpty ? "none" : "";
    if (isEmpty) replace(empty, ...nothing(words.length > 0));
  }

  function nothing(isFiltered) {
    if (isFiltered && !live.isLoading) return [h("b", {}, "No host matches"), "Change the filter, or clear it."];
    if (live.refused) return [h("b", {}, "The fleet is not shown"), live.refused.message];
    if (live.isLoading || !live.isConnected) return [h("b", {}, "Loading the fleet"), "The hosts appear as they come."];
    return [h("b", {}, "No worker has connected yet"), "Start one on a GPU host: ", h("code", {}, "leasehold worker --coordinator HOST:PORT")];
  }

  function firstAt(y) {
    let low = 0;
    let high = hosts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (tops[middle + 1] <= y) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // Makes the rows in sight exist, and no others but the one with the focus.
  function place() {
    const first = Math.max(0, firstAt(list.scrollTop) - SPARE_ROWS);
    const last = Math.min(hosts.length, firstAt(list.scrollTop + list.clientHeight) + 1 + SPARE_ROWS);
    const wanted = new Set(hosts.slice(first, last));
    const focused = list.contains(document.activeElement) ? document.activeElement.closest(".host")?.dataset.worker : undefined;
    for (const [id, row] of rows) {
      if (wanted.has(id) || (id === focused && hosts.includes(id))) continue;
      row.element.remove();
      rows.delete(id);
    }
    for (let index = first; index < last; index += 1) {
      const id = hosts[index];
      let row = rows.get(id);
      if (!row) {
        row = { element: h("section", { class: "host", "data-worker": id }), top: -1 };
        drawHost(row.element, id, chosen, isNarrow());
        rows.set(id, row);
        height.append(row.element);
      }
      if (row.top !== tops[index]) {
        row.top = tops[index];
        row.element.style.transform = `translateY(${tops[index]}px)`;
      }
      const size = tops[index + 1] - tops[index];
      if (row.size !== size) {
        row.size = size;
        row.element.style.height = `${size}px`;
      }
    }
  }

  function choose(uuid) {
    chosen = uuid;
    drawer?.end();
    drawer = null;
    if (uuid) {
      drawer = drawerFor(uuid, () => {
        const before = chosen;
        choose(null);
        list.querySelector(`[data-uuid="${CSS.escape(before)}"]`)?.focus();
      });
      split.append(drawer.element);
    }
    for (const row of rows.values()) for (const one of row.element.querySelectorAll(".slot")) {
      one.classList.toggle("chosen", one.dataset.uuid === uuid);
      if (!picking()) one.setAttribute("aria-expanded", String(one.dataset.uuid === uuid));
    }
    place();
  }

  function scrollToHost(worker) {
    const index = hosts.indexOf(worker);
    if (index >= 0 && (tops[index] < list.scrollTop || tops[index + 1] > list.scrollTop + list.clientHeight)) list.scrollTop = tops[index];
  }

  // A link may name a GPU before the fleet is loaded.
  let wanted = new URLSearchParams(location.search).get("gpu");
  function chooseWanted() {
    const worker = live.gpus.get(wanted)?.worker_id;
    if (!wanted || (live.isLoading && !live.workers.has(worker))) return;
    const uuid = wanted;
    wanted = null;
    if (!worker) notice("No GPU has this UUID now.");
    else {
      scrollToHost(worker);
      choose(uuid);
    }
  }

  list.addEventListener("click", (event) => {
    const slot = event.target.closest(".slot");
    if (!slot) return;
    if (picking()) pickGpu(slot.dataset.uuid);
    else choose(slot.dataset.uuid === chosen ? null : slot.dataset.uuid);
    // After a key, the focus goes to the drawer, which is the last part of the page. Esc gives it back.
    if (!event.detail) drawer?.element.focus({ preventScroll: true });
  });

  // One stop of the Tab key for all tiles. Arrows move between them.
  list.addEventListener("focusin", (event) => {
    const slot = event.target.closest(".slot");
    if (!slot) return;
    for (const one of list.querySelectorAll('.slot[tabindex="0"]')) if (one !== slot) one.tabIndex = -1;
    slot.tabIndex = 0;
  });
  list.addEventListener("keydown", (event) => {
    const slot = event.target.closest(".slot");
    if (!slot) return;
    const worker = slot.closest(".host").dataset.worker;
    const uuids = live.gpusOf.get(worker) ?? [];
    const at = uuids.indexOf(slot.dataset.uuid);
    const stops = hosts.filter((id) => live.gpusOf.has(id)); // hosts with tiles
    const row = stops.indexOf(worker);
    const last = stops.length - 1;
    const goal = { ArrowRight: at + 1 < uuids.length ? [row, at + 1] : [row + 1, 0], ArrowLeft: at > 0 ? [row, at - 1] : [row - 1, Infinity], ArrowDown: [row + 1, at], ArrowUp: [row - 1, at], Home: [0, 0], End: [last, Infinity], PageDown: [Math.min(last, row + 8), at], PageUp: [Math.max(0, row - 8), at] }[event.key];
    if (!goal) return;
    event.preventDefault();
    const [stop, toAt] = goal;
    const goals = live.gpusOf.get(stops[stop]) ?? [];
    const uuid = goals[Math.min(toAt, goals.length - 1)];
    if (!uuid) return;
    const toRow = hosts.indexOf(stops[stop]);
    if (tops[toRow] < list.scrollTop) list.scrollTop = tops[toRow];
    if (tops[toRow + 1] > list.scrollTop + list.clientHeight) list.scrollTop = tops[toRow + 1] - list.clientHeight;
    place();
    list.querySelector(`[data-uuid="${CSS.escape(uuid)}"]`)?.focus({ preventScroll: true });
  });
  function onKey(event) {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (picking()) cancelPick();
    else if (chosen) drawer?.close();
  }
  document.addEventListener("keydown", onKey);

  function ensureTabStop() {
    if (!list.querySelector('.slot[tabindex="0"]')) {
      const first = list.querySelector(".slot");
      if (first) first.tabIndex = 0;
    }
  }

  function refresh(workers) {
    list.classList.toggle("picking", picking() !== null);
    if (isListStale) listHosts();
    for (const id of workers) {
      const row = rows.get(id);
      if (row && live.workers.has(id)) drawHost(row.element, id, chosen, isNarrow());
    }
    place();
    ensureTabStop();
  }

  let countTimer = 0;
  function countSoon() {
    countTimer ||= setTimeout(() => {
      countTimer = 0;
      drawCounts(counts);
    }, COUNT_MS);
  }

  const endChanges = onChange((changes) => {
    const touched = new Set([...(changes.get("worker") ?? []), ...(changes.get("sample") ?? [])]);
    if (changes.has("worker") || changes.has("state")) {
      // Heights and the filter depend on what a host has.
      isListStale = true;
      countSoon();
    }
    if (touched.size || changes.has("state")) refresh(touched);
    if (picking() && changes.has("worker")) checkPick();
    chooseWanted();
    drawer?.update();
  });
  // Ends a choice whose workload has another state than before, and says why.
  function checkPick() {
    const problem = picking()?.problem();
    if (!problem) replace(bar, pickBar());
    else {
      cancelPick();
      notice(problem);
    }
  }

  const endPick = onPick(() => {
    const hadFocus = bar.contains(document.activeElement);
    replace(bar, pickBar());
    isListStale = true; // the filter hides no host of a choice
    refresh(rows.keys());
    if (hadFocus && !picking()) list.querySelector('.slot[tabindex="0"]')?.focus({ preventScroll: true }); // "Cancel" has gone
    if (picking()) {
      choose(null);
      scrollToHost(picking().worker);
      announce(picking().text);
      place();
      list.querySelector(".slot.candidate")?.focus({ preventScroll: true });
    }
  });
  let isPlacing = false;
  list.addEventListener("scroll", () => {
    if (isPlacing) return;
    isPlacing = true;
    requestAnimationFrame(() => {
      isPlacing = false;
      place();
    });
  }, { passive: true });
  search.addEventListener("input", () => {
    isListStale = true;
    list.scrollTop = 0;
    refresh([]);
    announce(`Matching hosts: ${hosts.length}.`);
  });
  const sizes = new ResizeObserver(() => {
    isListStale = true;
    refresh(rows.keys());
  });
  sizes.observe(list);

  async function sample() {
    const shown = [...rows.keys()].filter((id) => live.workers.get(id)?.state === "CONNECTED").slice(0, 60);
    if (!shown.length || document.visibilityState !== "visible" || !live.isConnected) return;
    const query = shown.map((id) => `worker=${encodeURIComponent(id)}`).join("&");
    const found = await ask(`/api/samples?${query}`).catch(() => null);
    for (const [uuid, one] of Object.entries(found ?? {})) setSample(uuid, one);
  }
  const sampling = setInterval(sample, SAMPLE_MS);
  const firstSample = setTimeout(sample, 700);

  drawCounts(counts);
  checkPick();
  refresh([]);
  chooseWanted();
  return () => {
    endChanges();
    endPick();
    if (picking()) cancelPick();
    clearInterval(sampling);
    clearTimeout(firstSample);
    clearTimeout(countTimer);
    sizes.disconnect();
    document.removeEventListener("keydown", onKey);
    drawer?.end();
  };
}
