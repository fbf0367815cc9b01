// Takes tapes as they grow; keeps the log of threshold crossings that the page shows.
import { Lookout, type Excursion } from "../data/excursions";
import type { Shelf } from "./shelf";
import type { Store } from "./store";

export const MAX_LOGGED = 500;

export class Alarm {
  #lookouts = new Map<string, Lookout>();
  #stops = new Map<string, () => void>();

  constructor(
    private readonly store: Store,
    private readonly shelf: Shelf,
  ) {}

  /** Watch a run from now on; what is on its tape already counts as seen. */
  watch(id: string): void {
    const run = this.store.getState().runs[id];
    if (!run || this.#lookouts.has(id)) return;
    this.#lookouts.set(id, new Lookout(id, run.probes));
    this.#stops.set(
      id,
      this.shelf.watch(id, () => this.#look(id)),
    );
    this.#look(id);
  }

  forget(ids: readonly string[]): void {
    for (const id of ids) {
      this.#stops.get(id)?.();
      this.#stops.delete(id);
      this.#lookouts.delete(id);
    }
    this.#publish(0);
  }

  #look(id: string): void {
    const lookout = this.#lookouts.get(id);
    if (!lookout) return;
    const before = lookout.found.length;
    if (lookout.scan(this.shelf.get(id))) this.#publish(Math.max(0, lookout.found.length - before));
  }

  #publish(numNew: number): void {
    const newest: Excursion[] = [];
    let numAll = 0;
    for (const { found } of this.#lookouts.values()) {
      numAll += found.length;
      newest.push(...found.slice(-MAX_LOGGED));
    }
    const excursions = newest.slice(-MAX_LOGGED);
    this.store.setState((state) => ({
      excursions,
      numExcursionsDropped: numAll - excursions.length,
      numUnseen: state.pane === "crossings" ? 0 : state.numUnseen + numNew,
    }));
  }
}
