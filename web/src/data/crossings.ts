// Finds the stretches of tokens in which a probe is at or over its threshold.
import type { ProbeInfo } from "../api/types";
import type { TokenRef, Transcript } from "./transcript";

export interface Crossing {
  run: string;
  probe: string;
  first: TokenRef;
  /** The last token of the crossing so far. */
  last: TokenRef;
  peak: number;
  peakAt: TokenRef;
  threshold: number;
}

type Watched = Pick<ProbeInfo, "name"> & { threshold: number };

/** Reads each row once, in order. A crossing ends at a token below the threshold or without a score, and
 * where the prompt ends. */
export class CrossingFinder {
  readonly found: Crossing[] = [];
  #next = 0;
  #promptLength = 0;
  /** For each probe that is over its threshold now, the index of its crossing in `found`. */
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

  /** Scan the rows that arrived since the last call; true if a crossing was found or has grown. */
  scan(transcript: Transcript): boolean {
    if (transcript.promptLength !== this.#promptLength) this.#restart(transcript.promptLength);
    let hasNews = false;
    for (; this.#next < transcript.length && transcript.scores.hasArrived(this.#next); this.#next += 1) {
      if (this.#next === transcript.promptLength) this.#open.clear();
      for (const probe of this.#watched) {
        if (this.#look(transcript, this.#next, probe)) hasNews = true;
      }
    }
    return hasNews;
  }

  /** A prompt that arrives late moves every row. */
  #restart(promptLength: number): void {
    this.#promptLength = promptLength;
    this.#next = 0;
    this.#open.clear();
    this.found.length = 0;
  }

  #look(transcript: Transcript, row: number, probe: Watched): boolean {
    const value = transcript.scores.value(probe.name, row);
    if (!(value >= probe.threshold)) {
      this.#open.delete(probe.name);
      return false;
    }
    const token = transcript.tokenAt(row);
    const open = this.#open.get(probe.name);
    if (open === undefined) this.#begin(probe, token, value);
    else this.#grow(open, token, value);
    return true;
  }

  #grow(at: number, token: TokenRef, value: number): void {
    const open = this.found[at];
    if (open) this.found[at] = grown(open, token, value);
  }

  #begin(probe: Watched, token: TokenRef, value: number): void {
    const { name, threshold } = probe;
    const begun = {
      run: this.run,
      probe: name,
      threshold,
      first: token,
      last: token,
      peak: value,
      peakAt: token,
    };
    this.#open.set(name, this.found.length);
    this.found.push(begun);
  }
}

/** A new object, so that a view that holds the old one sees the change. */
function grown(open: Crossing, token: TokenRef, value: number): Crossing {
  return value > open.peak ? { ...open, last: token, peak: value, peakAt: token } : { ...open, last: token };
}
