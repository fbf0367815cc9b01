// Renders tokens as plain spans in blocks, which keeps ten thousand tokens fast.
import type { Transcript } from "../../data/transcript";
import { kindOf, leadOf, shown } from "../../text/token";
import type { TokenClasses } from "./tokenClasses";

/** Blocks out of view cost no layout (content-visibility). A block ends at a newline if possible. */
const BLOCK_SOFT = 160;
const BLOCK_HARD = 240;

interface TokenSpan extends HTMLSpanElement {
  tokenRow?: number;
}

export class TokenSpans {
  #spans: TokenSpan[] = [];
  #kinds: string[] = [];
  #block: HTMLDivElement | null = null;
  #blockSize = 0;
  #firstWaiting = 0;
  #numMedia = 0;
  #notes = new Map<string, Map<TokenSpan, string>>();
  #marked = new Map<"hover" | "pin", TokenSpan>();

  constructor(
    private readonly host: HTMLElement,
    readonly from: number,
  ) {
    host.replaceChildren();
  }

  get end(): number {
    return this.from + this.#spans.length;
  }

  /** Add the tokens up to `to`, and colour those whose scores have come. */
  grow(transcript: Transcript, to: number, classes: TokenClasses): void {
    for (let row = this.end; row < to; row += 1) this.#add(transcript.tokens[row] ?? "", row);
    if (transcript.media.size !== this.#numMedia) this.#showMedia(transcript);
    for (let i = this.#firstWaiting; i < this.#spans.length; i += 1) this.#colour(i, classes);
    while (this.#firstWaiting < this.#spans.length) {
      if (!transcript.scores.hasArrived(this.from + this.#firstWaiting)) break;
      this.#firstWaiting += 1;
    }
  }

  /** Colour every token again, for another probe. */
  recolour(classes: TokenClasses): void {
    for (let i = 0; i < this.#spans.length; i += 1) this.#colour(i, classes);
  }

  mark(row: number | null, how: "hover" | "pin"): void {
    const old = this.#marked.get(how);
    if (old) old.removeAttribute(`data-${how}`);
    const span = row === null ? undefined : this.#spans[row - this.from];
    if (!span) return void this.#marked.delete(how);
    span.setAttribute(`data-${how}`, "");
    this.#marked.set(how, span);
  }

  /** Set the attribute `data-NAME` of tokens, by row, and remove it from all others. */
  annotate(name: "fired" | "differs", notes: ReadonlyMap<number, string>): void {
    for (const [span, said] of this.#notes.get(name) ?? []) {
      if (notes.get(span.tokenRow ?? -1) !== said) span.removeAttribute(`data-${name}`);
    }
    const told = new Map<TokenSpan, string>();
    for (const [row, text] of notes) {
      const span = this.#spans[row - this.from];
      if (!span) continue;
      if (span.getAttribute(`data-${name}`) !== text) span.setAttribute(`data-${name}`, text);
      told.set(span, text);
    }
    this.#notes.set(name, told);
  }

  span(row: number): HTMLElement | null {
    return this.#spans[row - this.from] ?? null;
  }

  /** The row of an event's token, or null between tokens. */
  rowOf(target: EventTarget | null): number | null {
    return (target as TokenSpan | null)?.tokenRow ?? null;
  }

  /** The nearest token on the next line in this direction. */
  lineStep(row: number, direction: 1 | -1): number {
    const here = this.span(row)?.getBoundingClientRect();
    if (!here) return row;
    let best = row;
    let bestGap = Infinity;
    let lineTop: number | null = null;
    for (let i = row + direction; i >= this.from && i < this.end; i += direction) {
      const rect = this.span(i)?.getBoundingClientRect();
      if (!rect || Math.abs(rect.top - here.top) < 4) continue;
      lineTop ??= rect.top;
      if (Math.abs(rect.top - lineTop) > 4) break;
      const gap = Math.abs(rect.left - here.left);
      if (gap < bestGap) [best, bestGap] = [i, gap];
    }
    return best;
  }

  #add(text: string, row: number): void {
    if (!this.#block || this.#isFull()) this.#open();
    const span: TokenSpan = document.createElement("span");
    const kind = kindOf(text);
    span.textContent = shown(text);
    const lead = leadOf(text);
    if (lead !== "") span.dataset.lead = lead;
    span.tokenRow = row;
    this.#kinds.push(kind === "plain" ? "t" : `t ${kind}`);
    this.#spans.push(span);
    this.#block?.append(span);
    this.#blockSize += 1;
  }

  /** Which tokens are no text is known when the scores of the prompt come. */
  #showMedia(transcript: Transcript): void {
    this.#numMedia = transcript.media.size;
    for (const [row, kind] of transcript.media) {
      const span = this.#spans[row - this.from];
      if (!span) continue;
      this.#kinds[row - this.from] = "t media";
      span.textContent = transcript.media.get(row - 1) === kind ? "" : kind;
      delete span.dataset.lead;
    }
  }

  #isFull(): boolean {
    if (this.#blockSize >= BLOCK_HARD) return true;
    const endsLine = this.#spans.at(-1)?.textContent.endsWith("\n") ?? false;
    return this.#blockSize >= BLOCK_SOFT && endsLine;
  }

  #open(): void {
    this.#block = document.createElement("div");
    this.#block.className = "block";
    this.#blockSize = 0;
    this.host.append(this.#block);
  }

  #colour(i: number, classes: TokenClasses): void {
    const span = this.#spans[i];
    const name = `${this.#kinds[i] ?? "t"}${classes(this.from + i)}`;
    if (span && span.className !== name) span.className = name;
  }
}
