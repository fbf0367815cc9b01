// Takes a growing tape; gives every stretch of tokens in which a probe is at or over its threshold.
import type { ProbeInfo } from "../api/types";
import type { Spot, Tape } from "./tape";

export interface Excursion {
  run: string;
  probe: string;
  first: Spot;
  /** The last token of the stretch so far. */
  last: Spot;
  peak: number;
  peakAt: Spot;
  threshold: number;
}

type Watched = Pick<ProbeInfo, "name"> & { threshold: number };

/** Reads each row once, in order; a stretch ends at a token below, without a score, or of the other part. */
export class Lookout {
  readonly found: Excursion[] = [];
  #next = 0;
  #promptLength = 0;
  /** Of probes that are over now: where in `found` their stretch is. */
  #open = new Map<string, number>();
  #watched: Watched[];

  constructor(
    private readonly run: string,
    probes: readonly ProbeInfo[],
  ) {
    this.#watched = probes.flatMap(({ name, threshold }) =>
      threshold === null ? [] : [{ name, threshold }],
    );
  }

  /** Scan what has arrived since; true if anything was found or has grown. */
  scan(tape: Tape): boolean {
    if (tape.promptLength !== this.#promptLength) this.#restart(tape.promptLength);
    let hasNews = false;
    for (; this.#next < tape.length && tape.scores.hasArrived(this.#next); this.#next += 1) {
      if (this.#next === tape.promptLength) this.#open.clear();
      for (const probe of this.#watched) {
        if (this.#look(tape, this.#next, probe)) hasNews = true;
      }
    }
    return hasNews;
  }

  /** A prompt that came late has moved every row. */
  #restart(promptLength: number): void {
    this.#promptLength = promptLength;
    this.#next = 0;
    this.#open.clear();
    this.found.length = 0;
  }

  #look(tape: Tape, row: number, probe: Watched): boolean {
    const value = tape.scores.value(probe.name, row);
    if (!(value >= probe.threshold)) {
      this.#open.delete(probe.name);
      return false;
    }
    const spot = tape.spot(row);
    const open = this.#open.get(probe.name);
    if (open === undefined) this.#begin(probe, spot, value);
    else this.#grow(open, spot, value);
    return true;
  }

  #grow(at: number, spot: Spot, value: number): void {
    const open = this.found[at];
    if (open) this.found[at] = grown(open, spot, value);
  }

  #begin(probe: Watched, spot: Spot, value: number): void {
    const { name, threshold } = probe;
    const begun = {
      run: this.run,
      probe: name,
      threshold,
      first: spot,
      last: spot,
      peak: value,
      peakAt: spot,
    };
    this.#open.set(name, this.found.length);
    this.found.push(begun);
  }
}

/** A new one: whoever shows the old one can see that it has changed. */
function grown(open: Excursion, spot: Spot, value: number): Excursion {
  return value > open.peak ? { ...open, last: spot, peak: value, peakAt: spot } : { ...open, last: spot };
}
