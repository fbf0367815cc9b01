// Keeps the newest runs in the browser's IndexedDB.
import type { RunFile } from "../data/runFile";

export const MAX_KEPT = 200;
const NAME = "clairai";
const RUNS = "runs";

/** The part of a run that is listed without its scores. */
export interface Entry {
  id: string;
  createdAt: number;
  run: RunFile["run"];
  probes: RunFile["probes"];
}

interface Stored extends Entry {
  file: RunFile;
}

export interface History {
  list(): Promise<Entry[]>;
  load(id: string): Promise<RunFile | null>;
  save(file: RunFile): Promise<void>;
  remove(ids: readonly string[]): Promise<void>;
}

export async function openHistory(factory: IDBFactory): Promise<History> {
  const opening = factory.open(NAME, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(RUNS, { keyPath: "id" });
  const database = await settled(opening);
  const runs = (mode: IDBTransactionMode) => database.transaction(RUNS, mode).objectStore(RUNS);
  return {
    list: () => listed(runs("readonly")),
    async load(id) {
      const stored = (await settled(runs("readonly").get(id))) as Stored | undefined;
      return stored?.file ?? null;
    },
    async save(file) {
      const { run, probes } = file;
      const stored: Stored = { id: run.id, createdAt: run.createdAt, run, probes, file };
      await settled(runs("readwrite").put(stored));
    },
    async remove(ids) {
      const kept = runs("readwrite");
      await Promise.all(ids.map((id) => settled(kept.delete(id))));
    },
  };
}

/** Uses a cursor, so that only one of the large files is in memory at a time. */
async function listed(runs: IDBObjectStore): Promise<Entry[]> {
  const found: Entry[] = [];
  await new Promise<void>((resolve, reject) => {
    const walk = runs.openCursor();
    walk.onerror = () => reject(walk.error ?? new Error("the history cannot be read"));
    walk.onsuccess = () => {
      const cursor = walk.result;
      if (!cursor) {
        resolve();
        return;
      }
      const { id, createdAt, run, probes } = cursor.value as Stored;
      found.push({ id, createdAt, run, probes });
      cursor.continue();
    };
  });
  return found.sort((a, b) => a.createdAt - b.createdAt);
}

function settled<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error ?? new Error("the history cannot be used"));
  });
}

/** For pages without storage: exported files, and private windows of some browsers. */
export function noHistory(): History {
  return {
    list: () => Promise.resolve([]),
    load: () => Promise.resolve(null),
    save: () => Promise.resolve(),
    remove: () => Promise.resolve(),
  };
}
