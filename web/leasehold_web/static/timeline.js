// The timeline: every GPU a row, leases as spans, and the joints between them. This module has its state and its tools.
import { announce, append, h, replace, safe } from "/static/dom.js";
import { History } from "/static/history.js";
import { awaitsNames, live, onChange } from "/static/live.js";
import { coloursOf } from "/static/painter.js";
import { now } from "/static/server_time.js";
import { listen } from "/static/timeline_input.js";
import { legend } from "/static/timeline_legend.js";
import { drawPicture, itemAt } from "/static/timeline_picture.js";
import { HEAD, layOut, ROW, spansInOrder } from "/static/timeline_rows.js";
import { tableOf } from "/static/timeline_table.js";
import { RANGES, TimeWindow } from "/static/timeline_window.js";
import { keyOf, textOf } from "/static/timeline_words.js";
import { workloadsOf } from "/static/words.js";

const FRESH_MS = 20; // from a change to the question for the history, so that changes of one command share it
const FRESH_GAP_MS = 250; // least time between two such questions
const MOVED_MS = 120; // how long the time in sight rests before its history is asked for
const LAYOUT_MS = 500; // least time between two layouts while the picture glides

export function show(main) {
  const time = new TimeWindow(new URLSearchParams(location.search));
  let chosen = null; // an item: { span }, { joint }, { command } or { event }
  let hovered = null;
  let isOver = false;
  let frame = 0;
  let colours = null;
  let layout = { rows: [], placed: new Map(), spans: [], joints: [], height: 0 };
  let hits = []; // what is drawn, as drawPicture returns it

  const search = h("input", { type: "search", placeholder: "Filter: host, workload", "aria-label": "Filter rows by host or workload" });
  const ranges = h("div", { class: "segments", role: "group", "aria-label": "Time" }, RANGES.map(([text, value]) => h("button", { type: "button", "data-range": String(value), onclick: () => zoomTo(value, null, 0) }, text)));
  const follow = h("button", { type: "button", "aria-pressed": "true", onclick: () => setFollowing(!time.isFollowing) }, "Follow now");
  const asTable = h("button", { type: "button", "aria-pressed": "false", onclick: () => toggleTable() }, "Table");
  const canvas = h("canvas", { tabindex: "0", role: "application", "aria-roledescription": "timeline", "aria-label": "Timeline of leases", "aria-describedby": "timeline-help" });
  const spacer = h("div", { class: "height" });
  const box = h("div", { class: "timeline" }, spacer, canvas);
  const tableBox = h("div", { class: "page", hidden: true });
  const tip = h("div", { class: "tip", hidden: true });
  const state = h("span", { class: "muted", role: "status" });
  const help = h("p", { id: "timeline-help", class: "unseen" }, "Left and right move in time, plus and minus zoom, up and down go from span to span, Enter opens the workload, and N returns to now. The button Table shows the bars of GPUs as a table.");
  append(main, [
    h("div", { class: "head timeline-tools" }, h("h1", {}, "Timeline"), ranges, follow, asTable, state, h("div", { class: "spacer" }), search),
    h("div", { class: "split" }, box, tableBox), legend(), tip, help]);
  const history = new History(() => !isOver && refresh());

  function arrange() {
    layout = layOut(history, time, search.value.toLowerCase().split(/\s+/).filter(Boolean));
    spacer.style.height = `${layout.height + HEAD + 8}px`;
  }

  function draw() {
    frame = 0;
    const { clientWidth: width, clientHeight: height, scrollTop } = box;
    if (isOver || !width || !height) return;
    colours ??= coloursOf(main);
    const empty = search.value ? "No row matches the filter." : awaitsNames() ? "Loading…" : live.isLoading || live.refused ? "The timeline is not shown." : "No GPU was reported, and no lease is stored for this time.";
    const commands = new Map([...history.commands, ...live.commands]).values();
    const events = [...history.events.values(), ...live.events.values()];
    hits = drawPicture(canvas, { width, height, scrollTop }, { time, layout, colours, chosen, hovered, commands, events, empty });
  }

  function soon() {
    frame ||= requestAnimationFrame(draw);
  }

  function refresh() {
    arrange();
    if (!tableBox.hidden) replace(tableBox, ...tableOf(layout, time, Boolean(search.value.trim())));
    state.textContent = safe(history.problem) || (history.isCut(time.start) ? "More happened than fits: zoom in." : history.lacksParked ? "More workloads are parked than fit: some parked times are missing." : "");
    refreshTools();
    soon();
  }

  function refreshTools() {
    for (const one of ranges.children) one.setAttribute("aria-pressed", String(Math.abs(Number(one.dataset.range) - time.range) < 1));
    follow.setAttribute("aria-pressed", String(time.isFollowing));
    follow.className = time.isFollowing ? "" : "primary";
    follow.textContent = time.isFollowing ? "Following now" : "Follow now";
  }

  // The end of the time in sight, as the history is asked for it.
  const present = () => (time.end < now() ? time.end : Infinity);

  let wantTimer = 0;
  function moved(restMs = MOVED_MS) {
    arrange();
    soon();
    clearTimeout(wantTimer);
    const settle = () => {
      window.history.replaceState(null, "", `?${time.query}`);
      history.want(time.start, present());
    };
    if (restMs) wantTimer = setTimeout(settle, restMs);
    else settle();
    refreshTools();
  }

  function setFollowing(value) {
    if (value) time.follow();
    else time.rest();
    moved(0);
  }

  function zoomTo(range, around, restMs) {
    time.zoomTo(range, around);
    moved(restMs);
  }

  function showTip(item, x, y) {
    tip.hidden = !item;
    if (!item) return;
    const [title, text] = textOf(item);
    replace(tip, h("b", {}, title), text);
    const rect = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 14, window.innerWidth - rect.width - 8))}px`;
    tip.style.top = `${y + rect.height + 24 > window.innerHeight ? y - rect.height - 10 : y + 16}px`;
  }

  async function open(item) {
    if (!item) return;
    const { go } = await import("/static/app.js");
    const id = item.span?.workload_id ?? item.joint?.workload ?? (item.command && workloadsOf(item.command)[0]);
    if (id) go(`/workloads/${encodeURIComponent(id)}`);
    else if (item.command) go(`/commands/${encodeURIComponent(item.command.command_id)}`);
  }

  function point(item, x, y) {
    if (item !== hovered) soon();
    hovered = item;
    showTip(item, x, y);
  }

  // The first touch of an item shows it, the second one opens it.
  function press(item, event) {
    const isShown = chosen && item && keyOf(chosen) === keyOf(item);
    if (event.pointerType === "mouse" || !item || isShown) {
      open(item);
      return;
    }
    chosen = item;
    showTip(item, event.clientX, event.clientY);
    soon();
  }

  function step(by) {
    const shown = spansInOrder(layout);
    if (!shown.length) return;
    const at = shown.findIndex((one) => one.span_id === chosen?.span?.span_id);
    const span = shown[Math.min(shown.length - 1, Math.max(0, at < 0 ? (by > 0 ? 0 : shown.length - 1) : at + by))];
    chosen = { span };
    const y = layout.placed.get(span.gpu_uuid);
    if (y < box.scrollTop + ROW) box.scrollTop = y - ROW;
    if (y + HEAD > box.scrollTop + box.clientHeight - ROW) box.scrollTop = y + HEAD - box.clientHeight + ROW;
    announce(textOf(chosen).join(": "));
    soon();
    requestAnimationFrame(() => {
      const rect = canvas.getBoundingClientRect();
      const { labels, xOf } = time.scale(box.clientWidth);
      showTip(chosen, rect.left + Math.max(labels, Math.min(xOf(span.begin_time), rect.width - 60)), rect.top + y + HEAD - box.scrollTop);
    });
  }

  listen(canvas, {
    scale: () => time.scale(box.clientWidth),
    range: () => time.range,
    itemAt: (x, y) => itemAt(hits, x, y),
    point, press, step, zoomTo,
    leave: () => point(null),
    pan: (milliseconds) => {
      time.pan(milliseconds);
      moved();
    },
    follow: () => setFollowing(true),
    scrollBy: (pixels) => {
      box.scrollTop += pixels;
    },
    open: () => open(chosen),
    clear: () => {
      chosen = null;
      showTip(null);
      soon();
    },
  });

  function toggleTable() {
    const isTable = tableBox.hidden;
    tableBox.hidden = !isTable;
    box.style.display = isTable ? "none" : "";
    tableBox.style.paddingTop = "12px";
    asTable.setAttribute("aria-pressed", String(isTable));
    asTable.textContent = isTable ? "Picture" : "Table";
    refresh();
  }

  // While it follows, the picture glides. With less motion, it goes on once a second.
  const motion = matchMedia("(prefers-reduced-motion: reduce)");
  let glideTimer = 0;
  let arrangedAt = 0;
  function glide() {
    if (time.isFollowing && document.visibilityState === "visible") {
      time.follow();
      if (Date.now() - arrangedAt >= LAYOUT_MS) {
        arrangedAt = Date.now();
        arrange();
      }
      soon();
    }
    glideTimer = setTimeout(glide, motion.matches ? 1000 : Math.max(33, Math.min(1000, time.range / 3000)));
  }

  let freshTimer = 0;
  let freshAt = 0;
  const endChanges = onChange((changes) => {
    if (changes.has("gap")) history.forget();
    if (changes.has("state") && !time.isFollowing && time.settle()) moved();
    if (freshTimer || !["worker", "gpu", "workload", "command", "state"].some((kind) => changes.has(kind))) return;
    // The coordinator stores a change with the answer to the question for it.
    freshTimer = setTimeout(() => {
      freshTimer = 0;
      freshAt = Date.now();
      history.wantNews(time.start, present());
      refresh();
    }, Math.max(FRESH_MS, freshAt + FRESH_GAP_MS - Date.now()));
  });
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const onScheme = () => {
    colours = null;
    soon();
  };
  scheme.addEventListener("change", onScheme);
  box.addEventListener("scroll", soon, { passive: true });
  search.addEventListener("input", refresh);
  const sizes = new ResizeObserver(soon);
  sizes.observe(box);
  refresh();
  moved();
  glide();
  return () => {
    isOver = true;
    history.end();
    endChanges();
    clearTimeout(glideTimer);
    clearTimeout(freshTimer);
    clearTimeout(wantTimer);
    cancelAnimationFrame(frame);
    sizes.disconnect();
    scheme.removeEventListener("change", onScheme);
  };
}
