// The timeline: every GPU a row, leases as spans, and the joints between them.
import { announce, append, h, replace } from "/static/dom.js";
import { History } from "/static/history.js";
import { live, onChange, workerName, workloadName } from "/static/live.js";
import { coloursOf, drawJoint, drawSpan, sized } from "/static/painter.js";
import { jointsOf, tickText, ticksOf } from "/static/spans.js";
import { clock, lower, moment, operationOf, PARKED, seconds, workloadsOf } from "/static/words.js";

const MINUTE = 60000;
const RANGES = [["1 min", MINUTE], ["5 min", 5 * MINUTE], ["15 min", 15 * MINUTE], ["1 h", 60 * MINUTE], ["6 h", 360 * MINUTE], ["1 d", 1440 * MINUTE], ["1 w", 10080 * MINUTE]];
const LEAST = 10000;
const MOST = 8 * 1440 * MINUTE;
const ROW = 26;
const HOST = 26; // the line with the name of a host
const AXIS = 24;
const LANE = 18; // one line of commands
const LANES = 3;
const TABLE_LIMIT = 1000;
const FRESH_MS = 20; // from a change to the question for the history, so that changes of one command share it
const FRESH_GAP_MS = 250; // least time between two such questions

export function show(main) {
  let range = Number(new URLSearchParams(location.search).get("range")) || 5 * MINUTE;
  if (!(range >= LEAST && range <= MOST)) range = 5 * MINUTE;
  let end = Date.now();
  let isFollowing = true;
  let chosen = null; // { span }, { command } or { event }
  let hovered = null;
  let isOver = false;
  let frame = 0;
  let colours = null;
  const motion = matchMedia("(prefers-reduced-motion: reduce)");

  const search = h("input", { type: "search", placeholder: "Filter: host, workload", "aria-label": "Filter rows by host or workload" });
  const ranges = h("div", { class: "segments", role: "group", "aria-label": "Time" }, RANGES.map(([text, value]) => h("button", { type: "button", "data-range": String(value), onclick: () => zoomTo(value) }, text)));
  const follow = h("button", { type: "button", "aria-pressed": "true", onclick: () => setFollowing(!isFollowing) }, "Follow now");
  const asTable = h("button", { type: "button", "aria-pressed": "false", onclick: () => toggleTable() }, "Table");
  const canvas = h("canvas", { tabindex: "0", role: "application", "aria-roledescription": "timeline", "aria-label": "Timeline of leases", "aria-describedby": "timeline-help" });
  const spacer = h("div", { class: "height" });
  const box = h("div", { class: "timeline" }, spacer, canvas);
  const tableBox = h("div", { class: "page", hidden: true });
  const tip = h("div", { class: "tip", hidden: true });
  const state = h("span", { class: "muted", role: "status" });
  const help = h("p", { id: "timeline-help", class: "unseen" }, "Left and right move in time, plus and minus zoom, up and down go from span to span, Enter opens the workload, and N returns to now. The button Table shows the same as a table.");
  append(main, [
    h("div", { class: "head timeline-tools" }, h("h1", {}, "Timeline"), ranges, follow, asTable, state, h("div", { class: "spacer" }), search),
    h("div", { class: "split" }, box, tableBox), legend(), tip, help]);

  const history = new History(() => !isOver && refresh());
  let rows = []; // { y, uuid } or { y, host }
  let placed = new Map(); // y by UUID
  let spans = [];
  let joints = [];
  let hits = []; // what is drawn, as { x1, x2, y1, y2, item }

  // What is known of GPUs that the live view does not have any more comes from their spans.
  function layOut() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const start = end - range;
    spans = [...history.spans.values()].filter((one) => one.begin_time < end && (one.end_time ?? Infinity) > start).sort((a, b) => a.begin_time - b.begin_time);
    const gpus = new Map();
    for (const gpu of live.gpus.values()) gpus.set(gpu.uuid, { uuid: gpu.uuid, slot: gpu.slot ?? 0, host: workerName(gpu.worker_id) });
    for (const span of spans) if (!gpus.has(span.gpu_uuid)) gpus.set(span.gpu_uuid, { uuid: span.gpu_uuid, slot: span.slot ?? 0, host: span.worker_name || span.worker_id });
    let shown = [...gpus.values()];
    if (words.length) {
      const texts = new Map(shown.map((one) => [one.uuid, [one.host]]));
      for (const span of spans) texts.get(span.gpu_uuid)?.push(nameOf(span));
      const isHostMatch = new Map();
      for (const one of shown) isHostMatch.set(one.uuid, words.every((word) => texts.get(one.uuid).join("\n").toLowerCase().includes(word)));
      shown = shown.filter((one) => isHostMatch.get(one.uuid));
    }
    shown.sort((a, b) => a.host.localeCompare(b.host, "en", { numeric: true }) || a.slot - b.slot);
    rows = [];
    placed = new Map();
    let y = 4;
    let host = null;
    for (const one of shown) {
      if (one.host !== host) {
        host = one.host;
        rows.push({ y: y + HOST / 2, host });
        y += HOST;
      }
      rows.push({ y: y + ROW / 2, uuid: one.uuid, slot: one.slot });
      placed.set(one.uuid, y + ROW / 2);
      y += ROW;
    }
    const isParked = (id) => PARKED.has(live.workloads.get(id)?.status?.state);
    joints = jointsOf([...history.spans.values()].filter((one) => placed.has(one.gpu_uuid)), isParked).filter((one) => one.from.end_time < end && (one.to?.begin_time ?? Infinity) > start);
    spacer.style.height = `${y + AXIS + LANES * LANE + 12}px`;
  }

  const labels = () => (box.clientWidth < 600 ? 44 : 64);
  const nameOf = (span) => span.workload_name || (span.workload_id ? workloadName(span.workload_id) : lower(span.state));
  const xOf = (time) => labels() + ((time - (end - range)) / range) * (box.clientWidth - labels());
  const timeAt = (x) => end - range + ((x - labels()) / Math.max(1, box.clientWidth - labels())) * range;

  function draw() {
    frame = 0;
    if (isOver || box.hidden) return;
    const width = box.clientWidth;
    const height = box.clientHeight;
    if (!width || !height) return;
    const context = sized(canvas, width, height);
    colours ??= coloursOf(main);
    hits = [];
    const head = AXIS + LANES * LANE + 4;
    const offset = head - box.scrollTop;
    const now = Date.now();
    drawGrid(context, width, height, head);
    context.save();
    context.beginPath();
    context.rect(0, head, width, height - head);
    context.clip();
    drawRows(context, width, height, offset);
    context.beginPath();
    context.rect(labels(), head, width - labels(), height - head);
    context.clip();
    const focus = hovered?.span?.workload_id ?? hovered?.joint?.workload ?? chosen?.span?.workload_id ?? "";
    const isDim = (id) => Boolean(focus) && id !== focus;
    for (const span of spans) {
      const y = placed.get(span.gpu_uuid);
      if (y === undefined || y + offset < head - ROW || y + offset > height + ROW) continue;
      const x1 = xOf(span.begin_time);
      const x2 = xOf(Math.min(span.end_time ?? now, end + MINUTE));
      drawSpan(context, span, x1, x2, y + offset, colours, { isDim: isDim(span.workload_id), isChosen: chosen?.span?.span_id === span.span_id, name: nameOf(span), isOpen: !span.end_time, left: labels() });
      hits.push({ x1, x2: Math.max(x2, x1 + 4), y1: y + offset - 11, y2: y + offset + 11, item: { span } });
    }
    for (const joint of joints) {
      const y1 = placed.get(joint.from.gpu_uuid);
      const y2 = placed.get((joint.to ?? joint.from).gpu_uuid);
      if (y1 === undefined || y2 === undefined) continue;
      const x1 = xOf(joint.from.end_time);
      const x2 = xOf(joint.to?.begin_time ?? Math.min(now, end));
      drawJoint(context, joint, x1, y1 + offset, x2, y2 + offset, colours, { isDim: isDim(joint.workload), isStrong: focus === joint.workload, isBusy: isBusy(joint, now) });
      const xs = joint.kind === "move" ? [x1 - 6, x2 + 6] : [x1, x2];
      hits.push({ x1: Math.min(...xs), x2: Math.max(...xs), y1: Math.min(y1, y2) + offset + (y1 === y2 ? -8 : 8), y2: Math.max(y1, y2) + offset + (y1 === y2 ? 8 : -8), item: { joint } });
    }
    context.restore();
    drawLanes(context, width, now);
    if (now <= end && now >= end - range) {
      context.fillStyle = colours.accent;
      context.fillRect(Math.min(xOf(now), width - 2), AXIS, 1.5, height - AXIS);
    }
    if (!rows.length) {
      context.fillStyle = colours.muted;
      context.font = `14px ${colours.font}`;
      context.textAlign = "center";
      context.fillText(search.value ? "No row matches the filter." : live.isLoading ? "Loading…" : "No GPU was reported, and no lease is stored for this time.", width / 2, height / 2);
      context.textAlign = "left";
    }
  }

  // Whether another span is in the row of a parked workload meanwhile.
  function isBusy({ from, to }, now) {
    const until = to?.begin_time ?? now;
    return spans.some((one) => one.gpu_uuid === from.gpu_uuid && one.span_id !== from.span_id && one.state === "LEASED" && one.begin_time < until - 500 && (one.end_time ?? Infinity) > from.end_time + 500);
  }

  function drawGrid(context, width, height, head) {
    const { ticks, step } = ticksOf(end - range, end, width - labels());
    context.font = `11px ${colours.font}`;
    context.textBaseline = "middle";
    for (const time of ticks) {
      const x = xOf(time);
      context.fillStyle = colours.line;
      context.fillRect(x, AXIS - 6, 1, height);
      context.fillStyle = colours.muted;
      if (x + 50 < width) context.fillText(tickText(time, step), x + 4, AXIS / 2);
    }
    context.fillStyle = colours.strong;
    context.fillRect(0, head - 1, width, 1);
    context.fillStyle = colours.muted;
    context.fillText(labels() > 50 ? "commands" : "cmd", 6, AXIS + (LANES * LANE) / 2 + 1);
  }

  function drawRows(context, width, height, offset) {
    for (const row of rows) {
      const y = row.y + offset;
      if (y < -ROW || y > height + ROW) continue;
      if (row.host) {
        context.fillStyle = colours.sunken;
        context.fillRect(0, y - HOST / 2 + 2, width, HOST - 4);
        context.font = `600 12px ${colours.font}`;
        context.fillStyle = colours.text;
        context.textBaseline = "middle";
        context.fillText(row.host, 8, y);
      } else {
        context.font = `12px ${colours.font}`;
        context.fillStyle = colours.muted;
        context.textBaseline = "middle";
        context.fillText(labels() > 50 ? `GPU ${row.slot}` : `${row.slot}`, 12, y);
        context.fillStyle = colours.line;
        context.fillRect(labels(), y + ROW / 2, width, 1);
      }
    }
  }

  // Commands as bars from their creation to their end, and events of hosts and GPUs as ticks below.
  function drawLanes(context, width, now) {
    const taken = Array(LANES).fill(-Infinity);
    context.save();
    context.beginPath();
    context.rect(labels(), AXIS, width, LANES * LANE + 3);
    context.clip();
    for (const command of [...allCommands()].sort((a, b) => a.create_time - b.create_time)) {
      const x1 = xOf(command.create_time);
      const x2 = Math.max(x1 + 7, xOf(command.end_time ?? now));
      if (x2 < labels() || x1 > width) continue;
      let lane = taken.findIndex((until) => until < x1);
      if (lane < 0) lane = taken.indexOf(Math.min(...taken));
      const text = operationOf(command);
      context.font = `500 11px ${colours.font}`;
      const wide = context.measureText(text).width;
      const hasRoom = taken[lane] < x1;
      taken[lane] = hasRoom ? Math.max(x2, x1 + wide + 20) : x2;
      const y = AXIS + lane * LANE + LANE / 2 + 1;
      const colour = command.state === "SUCCEEDED" ? colours.good : command.end_time ? colours.bad : colours.warn;
      context.fillStyle = colour;
      context.beginPath();
      context.moveTo(x1, y - 6);
      context.lineTo(x1 + 5, y);
      context.lineTo(x1, y + 6);
      context.closePath();
      context.fill();
      context.fillRect(x1, y - 1, x2 - x1, 2);
      if (hasRoom) {
        context.fillStyle = colours.text;
        context.textBaseline = "middle";
        const from = Math.max(x1 + 9, labels() + 4);
        const label = x2 - x1 > wide + 30;
        if (label) {
          context.fillStyle = colours.surface;
          context.fillRect(from - 2, y - 7, wide + 4, 14);
          context.fillStyle = colours.text;
        } else if (x2 - x1 > 12) {
          context.fillStyle = colours.surface;
          context.fillRect(from - 2, y - 7, wide + 4, 14);
          context.fillStyle = colours.text;
        }
        context.fillText(text, from, y);
      }
      hits.push({ x1: x1 - 2, x2: Math.max(x2, x1 + wide + 12), y1: y - 9, y2: y + 9, item: { command } });
    }
    for (const event of [...history.events.values(), ...live.events.values()]) {
      if (/^(COMMAND|WORKLOAD)/.test(event.kind) || !event.kind) continue;
      const x = xOf(event.time);
      if (x < labels() || x > width) continue;
      context.fillStyle = /LOST|HEALTH|REFUSED|ERROR|STALE/.test(event.kind) ? colours.bad : colours.muted;
      context.beginPath();
      context.arc(x, AXIS + LANES * LANE - 1, 3, 0, 7);
      context.fill();
      hits.push({ x1: x - 4, x2: x + 4, y1: AXIS + LANES * LANE - 6, y2: AXIS + LANES * LANE + 4, item: { event } });
    }
    context.restore();
  }

  function* allCommands() {
    const seen = new Set();
    for (const [id, command] of live.commands) {
      seen.add(id);
      yield command;
    }
    for (const [id, command] of history.commands) if (!seen.has(id)) yield command;
  }

  function refresh() {
    layOut();
    if (!tableBox.hidden) drawTable();
    state.textContent = history.problem || (history.isTruncated ? "More happened than fits: zoom in, or filter." : "");
    for (const one of ranges.children) one.setAttribute("aria-pressed", String(Math.abs(Number(one.dataset.range) - range) < 1));
    follow.setAttribute("aria-pressed", String(isFollowing));
    follow.className = isFollowing ? "" : "primary";
    follow.textContent = isFollowing ? "Following now" : "Follow now";
    soon();
  }

  function soon() {
    frame ||= requestAnimationFrame(draw);
  }

  let wantTimer = 0;
  function moved() {
    layOut();
    soon();
    clearTimeout(wantTimer);
    wantTimer = setTimeout(() => history.want(end - range, Math.min(end, Date.now())), 120);
    refreshTools();
  }

  function refreshTools() {
    for (const one of ranges.children) one.setAttribute("aria-pressed", String(Math.abs(Number(one.dataset.range) - range) < 1));
    follow.setAttribute("aria-pressed", String(isFollowing));
    follow.className = isFollowing ? "" : "primary";
    follow.textContent = isFollowing ? "Following now" : "Follow now";
  }

  function setFollowing(value) {
    isFollowing = value;
    if (value) end = Date.now() + range * 0.02;
    moved();
  }

  function zoomTo(value, around = null) {
    const next = Math.min(MOST, Math.max(LEAST, value));
    const fixed = around ?? (isFollowing ? end : end - range / 2);
    const share = (end - fixed) / range;
    range = next;
    end = fixed + share * range;
    if (isFollowing || end > Date.now() + range * 0.02) end = Date.now() + range * 0.02;
    moved();
  }

  function pan(milliseconds) {
    isFollowing = false;
    end += milliseconds;
    if (end >= Date.now()) setFollowing(true);
    else moved();
  }

  function hitAt(x, y) {
    for (let at = hits.length - 1; at >= 0; at -= 1) {
      const one = hits[at];
      if (x >= one.x1 && x <= one.x2 && y >= one.y1 && y <= one.y2) return one.item;
    }
    return null;
  }

  function textOf(item) {
    if (item.span) {
      const { span } = item;
      const length = seconds(((span.end_time ?? Date.now()) - span.begin_time) / 1000);
      return [nameOf(span), `${lower(span.state)} ${span.worker_name}/${span.slot ?? 0} from ${clock(span.begin_time)} ${span.end_time ? `to ${clock(span.end_time)}` : "until now"}, ${length}${span.owner ? `. Owner: ${span.owner}` : ""}`];
    }
    if (item.joint) {
      const { from, to, kind } = item.joint;
      const place = (one) => `${one.worker_name}/${one.slot ?? 0}`;
      if (kind === "move") return [`${nameOf(from)} moved`, `from ${place(from)} to ${place(to)} at ${clock(to.begin_time)}`];
      return [`${nameOf(from)} was parked`, to ? `from ${clock(from.end_time)} to ${clock(to.begin_time)}, ${seconds((to.begin_time - from.end_time) / 1000)}; then restored on ${place(to)}` : `since ${clock(from.end_time)}`];
    }
    if (item.command) {
      const { command } = item;
      return [`${operationOf(command)} of ${workloadsOf(command).map(workloadName).join(", ") || workerName(command.worker_id)}`, `${lower(command.state)}, ${moment(command.create_time)}${command.end_time ? `, ${seconds((command.end_time - command.create_time) / 1000)}` : ""}${command.error ? `: ${command.error.message}` : ""}`];
    }
    return [moment(item.event.time), item.event.message || lower(item.event.kind)];
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

  // Dragging moves in time, and two fingers zoom.
  const pointers = new Map();
  let dragged = 0;
  let pinch = 0;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    pointers.set(event.pointerId, event);
    canvas.setPointerCapture(event.pointerId);
    dragged = 0;
    pinch = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) {
      const item = hitAt(event.offsetX, event.offsetY);
      canvas.style.cursor = item ? "pointer" : "";
      if (item !== hovered) {
        hovered = item;
        soon();
      }
      showTip(item, event.clientX, event.clientY);
      return;
    }
    pointers.set(event.pointerId, event);
    const perPixel = range / Math.max(1, box.clientWidth - labels());
    if (pointers.size === 2) {
      const [one, two] = [...pointers.values()];
      const distance = Math.abs(one.clientX - two.clientX);
      if (pinch && distance > 10) zoomTo(range * (pinch / distance), timeAt((one.offsetX + two.offsetX) / 2));
      pinch = distance;
      return;
    }
    const by = event.clientX - before.clientX;
    dragged += Math.abs(by);
    if (dragged > 4) {
      canvas.classList.add("dragging");
      showTip(null);
      pan(-by * perPixel);
      if (event.pointerType === "mouse") box.scrollTop -= event.clientY - before.clientY;
    }
  });
  const release = (event) => {
    const wasDown = pointers.delete(event.pointerId);
    canvas.classList.remove("dragging");
    if (event.type !== "pointerup" || !wasDown || dragged > 4) return;
    const item = hitAt(event.offsetX, event.offsetY);
    if (event.pointerType !== "mouse" && item && textOf(item).join() !== textOf(chosen ?? item).join()) {
      chosen = item; // the first touch shows, the second opens
      showTip(item, event.clientX, event.clientY);
      soon();
      return;
    }
    open(item);
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => {
    hovered = null;
    showTip(null);
    soon();
  });
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) {
      event.preventDefault();
      zoomTo(range * Math.exp(event.deltaY / 300), timeAt(event.offsetX));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan(((event.deltaX || event.deltaY) * range) / box.clientWidth);
    }
  }, { passive: false });

  canvas.addEventListener("keydown", (event) => {
    const act = {
      ArrowLeft: () => pan(-range / 10), ArrowRight: () => pan(range / 10), PageUp: () => pan(-range), PageDown: () => pan(range),
      "+": () => zoomTo(range / 1.5), "=": () => zoomTo(range / 1.5), "-": () => zoomTo(range * 1.5), n: () => setFollowing(true), Home: () => setFollowing(true),
      ArrowDown: () => step(1), ArrowUp: () => step(-1), Enter: () => open(chosen),
      Escape: () => {
        chosen = null;
        showTip(null);
        soon();
      },
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });

  // The next span, in the order of rows and then of time.
  function step(by) {
    const shown = spans.filter((one) => placed.has(one.gpu_uuid)).sort((a, b) => placed.get(a.gpu_uuid) - placed.get(b.gpu_uuid) || a.begin_time - b.begin_time);
    if (!shown.length) return;
    const at = shown.findIndex((one) => one.span_id === chosen?.span?.span_id);
    const span = shown[Math.min(shown.length - 1, Math.max(0, at < 0 ? (by > 0 ? 0 : shown.length - 1) : at + by))];
    chosen = { span };
    const y = placed.get(span.gpu_uuid);
    const head = AXIS + LANES * LANE + 4;
    if (y < box.scrollTop + ROW) box.scrollTop = y - ROW;
    if (y + head > box.scrollTop + box.clientHeight - ROW) box.scrollTop = y + head - box.clientHeight + ROW;
    announce(textOf(chosen).join(": "));
    soon();
    requestAnimationFrame(() => {
      const rect = canvas.getBoundingClientRect();
      showTip(chosen, rect.left + Math.max(labels(), Math.min(xOf(span.begin_time), rect.width - 60)), rect.top + y + head - box.scrollTop);
    });
  }

  function toggleTable() {
    const isTable = tableBox.hidden;
    tableBox.hidden = !isTable;
    box.hidden = isTable;
    box.style.display = isTable ? "none" : "";
    tableBox.style.paddingTop = "12px";
    asTable.setAttribute("aria-pressed", String(isTable));
    asTable.textContent = isTable ? "Picture" : "Table";
    refresh();
  }

  function drawTable() {
    const shown = spans.filter((one) => placed.has(one.gpu_uuid)).sort((a, b) => b.begin_time - a.begin_time).slice(0, TABLE_LIMIT);
    replace(tableBox, h("p", { class: "muted" }, `${shown.length} spans from ${moment(end - range)} to ${moment(end)}, the latest first.`),
      h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Spans" }, h("table", {}, h("thead", {}, h("tr", {}, ["GPU", "State", "Workload", "From", "To", "Length"].map((one) => h("th", { scope: "col" }, one)))),
        h("tbody", {}, shown.map((span) => h("tr", {}, h("td", {}, `${span.worker_name}/${span.slot ?? 0}`), h("td", {}, lower(span.state)), h("td", {}, span.workload_id ? h("a", { href: `/workloads/${encodeURIComponent(span.workload_id)}` }, nameOf(span)) : ""), h("td", {}, moment(span.begin_time)), h("td", {}, span.end_time ? moment(span.end_time) : "now"), h("td", {}, seconds(((span.end_time ?? Date.now()) - span.begin_time) / 1000))))))));
  }

  // While it follows, the picture glides; with less motion it goes on once a second.
  let glideTimer = 0;
  function glide() {
    if (isOver) return;
    const step_ = motion.matches ? 1000 : Math.max(33, Math.min(1000, range / 3000));
    if (isFollowing && document.visibilityState === "visible") {
      end = Date.now() + range * 0.02;
      layOutSometimes();
      soon();
    }
    glideTimer = setTimeout(glide, step_);
  }
  let laidOutAt = 0;
  function layOutSometimes() {
    if (Date.now() - laidOutAt < 500) return;
    laidOutAt = Date.now();
    layOut();
  }

  let freshTimer = 0;
  let freshAt = 0;
  let wasConnected = live.isConnected;
  const endChanges = onChange((changes) => {
    if (changes.has("state") && live.isConnected !== wasConnected) {
      wasConnected = live.isConnected;
      if (wasConnected) history.forget();
    }
    if ((changes.has("gpu") || changes.has("workload") || changes.has("command") || changes.has("state")) && !freshTimer) {
      // The coordinator stores a change with the answer to the question for it.
      freshTimer = setTimeout(() => {
        freshTimer = 0;
        freshAt = Date.now();
        history.want(end - range, Math.max(end, Date.now()));
        refresh();
      }, Math.max(FRESH_MS, freshAt + FRESH_GAP_MS - Date.now()));
    }
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
  setFollowing(true);
  glide();
  return () => {
    isOver = true;
    endChanges();
    clearTimeout(glideTimer);
    clearTimeout(freshTimer);
    clearTimeout(wantTimer);
    cancelAnimationFrame(frame);
    sizes.disconnect();
    scheme.removeEventListener("change", onScheme);
  };
}

function legend() {
  const sample = (draw) => {
    const canvas = h("canvas", { "aria-hidden": "true" });
    requestAnimationFrame(() => draw(sized(canvas, 44, 20), coloursOf(document.body)));
    return canvas;
  };
  const span = (state) => (context, colours) => drawSpan(context, { state, workload_id: "legend" }, 2, 42, 10, colours);
  const joint = (kind) => (context, colours) => drawJoint(context, { workload: "legend", kind, to: {} }, 3, kind === "move" ? 4 : 10, 41, kind === "move" ? 15 : 10, colours);
  return h("div", { class: "legend" }, [["leased", span("LEASED")], ["moved", joint("move")], ["parked", joint("parked")], ["reserved", span("RESERVED")], ["cordoned", span("CORDONED")], ["unhealthy", span("UNHEALTHY")], ["foreign", span("FOREIGN")]].map(([text, draw]) => h("span", {}, sample(draw), text)),
    h("span", {}, "Ctrl and wheel zoom, dragging moves"));
}

