// Pointer, wheel and keys on the picture of the timeline. Dragging moves in time, and two fingers zoom.

const DRAG_PX = 4; // a shorter way counts as a click

// Listens on the canvas. What follows from it is up to the timeline:
//   scale(), range(): the time in sight; itemAt(x, y): what is there, or null; point(item, x, y): the pointer is on it;
//   leave(): it has left; press(item, event): it was pressed; pan(ms), zoomTo(range, around), follow(), scrollBy(px);
//   step(by): the next span; open(): the chosen one; clear(): none is chosen.
export function listen(canvas, timeline) {
  listenToPointers(canvas, timeline);
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) {
      event.preventDefault();
      timeline.zoomTo(timeline.range() * Math.exp(event.deltaY / 300), timeline.scale().timeAt(event.offsetX));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      timeline.pan((event.deltaX || event.deltaY) * timeline.scale().perPixel);
    }
  }, { passive: false });

  canvas.addEventListener("keydown", (event) => {
    const range = timeline.range();
    const act = {
      ArrowLeft: () => timeline.pan(-range / 10), ArrowRight: () => timeline.pan(range / 10), PageUp: () => timeline.pan(-range), PageDown: () => timeline.pan(range),
      "+": () => timeline.zoomTo(range / 1.5), "=": () => timeline.zoomTo(range / 1.5), "-": () => timeline.zoomTo(range * 1.5), n: timeline.follow, Home: timeline.follow,
      ArrowDown: () => timeline.step(1), ArrowUp: () => timeline.step(-1), Enter: timeline.open, Escape: timeline.clear,
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
}

function listenToPointers(canvas, timeline) {
  const pointers = new Map(); // those that are down, by id
  let dragged = 0; // px since the first pointer went down
  let pinch = 0; // the distance of two fingers
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    dragged = pointers.size ? Infinity : 0; // the end of two fingers is no press
    pointers.set(event.pointerId, event);
    canvas.setPointerCapture(event.pointerId);
    pinch = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) {
      const item = timeline.itemAt(event.offsetX, event.offsetY);
      canvas.style.cursor = item ? "pointer" : "";
      timeline.point(item, event.clientX, event.clientY);
      return;
    }
    pointers.set(event.pointerId, event);
    if (pointers.size === 2) {
      const [one, two] = [...pointers.values()];
      const distance = Math.abs(one.clientX - two.clientX);
      if (pinch && distance > 10) timeline.zoomTo(timeline.range() * (pinch / distance), timeline.scale().timeAt((one.offsetX + two.offsetX) / 2));
      pinch = distance;
      return;
    }
    const by = event.clientX - before.clientX;
    dragged += Math.abs(by);
    if (dragged <= DRAG_PX) return;
    canvas.classList.add("dragging");
    timeline.leave();
    timeline.pan(-by * timeline.scale().perPixel);
    if (event.pointerType === "mouse") timeline.scrollBy(before.clientY - event.clientY);
  });
  const release = (event) => {
    const wasDown = pointers.delete(event.pointerId);
    canvas.classList.remove("dragging");
    if (event.type === "pointerup" && wasDown && dragged <= DRAG_PX) timeline.press(timeline.itemAt(event.offsetX, event.offsetY), event);
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", timeline.leave);
}
