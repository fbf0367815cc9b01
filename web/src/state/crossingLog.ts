// Logs threshold crossings of the runs on the page as their scores arrive.
import { CrossingFinder, type Crossing } from "../data/crossings";
import type { TranscriptStore } from "./transcriptStore";
import type { Store } from "./store";

export const MAX_LOGGED = 500;

export class CrossingLog {
  #finders = new Map<string, CrossingFinder>();
  #stops = new Map<string, () => void>();

  constructor(
    private readonly store: Store,
    private readonly transcripts: TranscriptStore,
  ) {}

  /** Log the crossings of a run, those of its existing tokens included. */
  watch(id: string): void {
    const run = this.store.getState().runs[id];
    if (!run || this.#finders.has(id)) return;
    this.#finders.set(id, new CrossingFinder(id, run.probes));
    this.#stops.set(
      id,
      this.transcripts.subscribe(id, () => this.#scan(id)),
    );
    this.#scan(id);
  }

  forget(ids: readonly string[]): void {
    for (const id of ids) {
      this.#stops.get(id)?.();
      this.#stops.delete(id);
      this.#finders.delete(id);
    }
    this.#publish(0);
  }

  #scan(id: string): void {
    const finder = this.#finders.get(id);
    if (!finder) return;
    const before = finder.found.length;
    if (finder.scan(this.transcripts.get(id))) this.#publish(Math.max(0, finder.found.length - before));
  }

  #publish(numNew: number): void {
    const newest: Crossing[] = [];
    let numAll = 0;
    for (const { found } of this.#finders.values()) {
      numAll += found.length;
      newest.push(...found.slice(-MAX_LOGGED));
    }
    const crossings = newest.slice(-MAX_LOGGED);
    this.store.setState((state) => ({
      crossings,
      numCrossingsDropped: numAll - crossings.length,
      numUnseen: state.pane === "crossings" ? 0 : state.numUnseen + numNew,
    }));
  }
}
