// The event streams of this window. A browser has six connections to a server, so a hidden window closes all of its
// streams, and opens them again when it is shown.
const HIDDEN_MS = 30000; // how long a hidden window keeps its streams
const streams = new Set();
let isReleased = false;
let timer = 0;

export function areReleased() {
  return isReleased;
}

// Adds a stream, as { open, close }. Each call of open opens the stream unless it is open. Returns how to remove it.
export function addStream(stream) {
  streams.add(stream);
  if (!isReleased) stream.open();
  return () => {
    streams.delete(stream);
    stream.close();
  };
}

// A window can be hidden from its start.
function follow() {
  clearTimeout(timer);
  if (document.visibilityState === "hidden") {
    timer = setTimeout(release, HIDDEN_MS);
    return;
  }
  isReleased = false;
  for (const stream of streams) stream.open();
}

function release() {
  isReleased = true;
  for (const stream of streams) stream.close();
}

document.addEventListener("visibilitychange", follow);
follow();
