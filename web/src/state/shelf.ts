// Takes run ids; gives their tapes, and tells watchers at most once a frame that one has changed.
import { Tape } from "../data/tape";
import type { Beat } from "./beat";

export class Shelf {
  #tapes = new Map<string, Tape>();
  #watchers = new Map<string, Set<() => void>>();
  #works = new Map<string, () => void>();

  constructor(private readonly beat: Beat) {}

  get(id: string): Tape {
    let tape = this.#tapes.get(id);
    if (!tape) {
      tape = new Tape();
      this.#tapes.set(id, tape);
    }
    return tape;
  }

  /** Whether anything is on the tape: one that was only looked at is still blank. */
  has(id: string): boolean {
    return (this.#tapes.get(id)?.version ?? 0) > 0;
  }

  put(id: string, tape: Tape): void {
    this.#tapes.set(id, tape);
    this.touch(id);
  }

  drop(id: string): void {
    this.#tapes.delete(id);
  }

  touch(id: string): void {
    this.beat.ask(this.#work(id));
  }

  watch(id: string, watcher: () => void): () => void {
    const watchers = this.#watchers.get(id) ?? new Set();
    this.#watchers.set(id, watchers);
    watchers.add(watcher);
    return () => void watchers.delete(watcher);
  }

  #work(id: string): () => void {
    const known = this.#works.get(id);
    if (known) return known;
    const work = () => this.#watchers.get(id)?.forEach((watcher) => watcher());
    this.#works.set(id, work);
    return work;
  }
}
