// The page's state that React renders; tokens and scores are kept outside it.
import { createStore, type StoreApi } from "zustand/vanilla";
import { MAX_LINES } from "../colour/lines";
import { NO_SAMPLING, type Run, type State } from "./types";

export type Store = StoreApi<State>;

export const EMPTY: State = {
  isFrozen: false,
  connection: { kind: "connecting" },
  key: { isNeeded: false, wasRefused: false },
  models: [],
  model: null,
  probes: null,
  engine: null,
  examples: [],
  runs: {},
  head: null,
  versus: null,
  probe: null,
  lines: [],
  pane: "chat",
  span: null,
  hasMarkdown: false,
  hasMarks: false,
  hasMono: false,
  hasShortcuts: true,
  theme: "system",
  steering: { kind: "unknown" },
  draft: { user: "", system: "", sampling: NO_SAMPLING, entries: [], rules: [], isPaired: true },
  crossings: [],
  numCrossingsDropped: 0,
  numUnseen: 0,
  notice: null,
};

export function createPageStore(initial: Partial<State> = {}): Store {
  return createStore<State>(() => ({ ...EMPTY, ...initial }));
}

export function putRun(store: Store, run: Run): void {
  store.setState((state) => ({ runs: { ...state.runs, [run.id]: run } }));
}

export function changeRun(store: Store, id: string, change: Partial<Run>): void {
  const run = store.getState().runs[id];
  if (run) putRun(store, { ...run, ...change });
}

/** The runs of a conversation from the first to `head`. */
export function pathTo(runs: Record<string, Run>, head: string | null): Run[] {
  const path: Run[] = [];
  const seen = new Set<string>();
  for (let id = head; id !== null && !seen.has(id);) {
    const run = runs[id];
    if (!run) break;
    seen.add(id);
    path.unshift(run);
    id = run.parent;
  }
  return path;
}

/** All answers in the place of this run, oldest first: those made by "Regenerate" and "Edit". */
export function siblings(runs: Record<string, Run>, run: Run): Run[] {
  return Object.values(runs)
    .filter((other) => other.parent === run.parent)
    .filter((other) => other.parent !== null || other.id === run.id || isVariant(other, run))
    .sort((a, b) => a.createdAt - b.createdAt);
}

// First turns have no common parent, so only the same question makes them variants.
function isVariant(a: Run, b: Run): boolean {
  return a.user === b.user;
}

/** The newest run that continues from `id`, or `id` itself. */
export function leafOf(runs: Record<string, Run>, id: string): string {
  let leaf = id;
  for (;;) {
    const children = Object.values(runs).filter((run) => run.parent === leaf);
    const newest = children.sort((a, b) => b.createdAt - a.createdAt)[0];
    if (!newest) return leaf;
    leaf = newest.id;
  }
}

/** Add a probe to the chart or remove it; null if the chart is full. */
export function toggledLine(lines: readonly string[], name: string): string[] | null {
  if (lines.includes(name)) return lines.filter((line) => line !== name);
  return lines.length < MAX_LINES ? [...lines, name] : null;
}
