// The latest states of the entries of a dialog. No snapshot has ended entries, so a gap of the live view removes an
// entry that ended meanwhile. The server is then asked for this entry. A deleted entry has isDeleted and no status.
import { ask } from "/static/dom.js";
import { areOld, live, onChange } from "/static/live.js";

const RETRY_MS = 2000; // after an answer that failed
const KINDS = {
  command: { path: "/api/commands/", map: live.commands, entryOf: (answer) => answer },
  workload: { path: "/api/workloads/", map: live.workloads, entryOf: (answer) => answer.workload },
};

// kind: "command" or "workload"; entries: the first states; onNews: called after changes of workloads, commands or
// the state of the view, and after each answer of the server. Returns { of, end }: the latest state of an id, and how to end the calls of onNews.
export function latestEntries(kind, entries, onNews) {
  const { path, map, entryOf } = KINDS[kind];
  const told = new Map(entries.map((one) => [one[`${kind}_id`], one]));
  let isOver = false;

  async function load(id) {
    try {
      told.set(id, entryOf(await ask(path + encodeURIComponent(id))));
    } catch (error) {
      if (error.isTransient) setTimeout(() => !isOver && load(id), RETRY_MS);
      if (error.status !== 404) return;
      told.set(id, { ...told.get(id), status: undefined, isDeleted: true });
    }
    if (!isOver) onNews();
  }

  function of(id) {
    const shown = map.get(id);
    if (shown && (shown.revision ?? 0) >= (told.get(id).revision ?? 0)) told.set(id, shown);
    return told.get(id);
  }

  const endChanges = onChange((changes) => {
    for (const id of told.keys()) if (areOld(changes, kind, id) && !map.has(id)) load(id);
    if (["workload", "command", "state"].some((one) => changes.has(one))) onNews();
  });
  return {
    of,
    end: () => {
      isOver = true;
      endChanges();
    },
  };
}
