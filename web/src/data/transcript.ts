// The tokens of one run and their scores, built from its events: first the prompt, then the answer.
import { ProtocolError, type RunEvent } from "../api/events";
import type { Echo } from "../api/steering";
import type {
  DoneEvent,
  Part,
  ProbeFinalEvent,
  ProbeUpdateEvent,
  PromptMedia,
  TokenEvent,
} from "../api/types";
import { ScoreTable } from "./scores";

/** A token of a run by part and index, which stay valid when a late prompt moves the rows. */
export interface TokenRef {
  part: Part;
  index: number;
}

export type MediaKind = PromptMedia["kind"];

/** The page shows one choice. */
const CHOICE = 0;

export class Transcript {
  /** Prompt tokens, then answer tokens. */
  readonly tokens: string[] = [];
  readonly ids: number[] = [];
  readonly scores = new ScoreTable();
  /** By row, the tokens of the prompt that only stand for a part of an image, a sound or a video. */
  readonly media = new Map<number, MediaKind>();
  promptLength = 0;
  /** The answer's text as OpenAI clients get it. */
  text = "";
  /** The number of rows that the server reports as lost. */
  lost = 0;
  /** The steering that the engine reported; null until it has. */
  echo: Echo | null = null;
  final: ProbeFinalEvent | null = null;
  done: DoneEvent | null = null;
  /** Increases with every change. */
  version = 0;

  get length(): number {
    return this.tokens.length;
  }

  get answerLength(): number {
    return this.tokens.length - this.promptLength;
  }

  rowOf(token: TokenRef): number {
    return token.part === "prompt" ? token.index : this.promptLength + token.index;
  }

  tokenAt(row: number): TokenRef {
    const index = row - this.promptLength;
    return index < 0 ? { part: "prompt", index: row } : { part: "answer", index };
  }

  /** The token as text; a small square for a part of an image or a sound. */
  wordAt(row: number): string {
    return this.media.has(row) ? "▪" : (this.tokens[row] ?? "");
  }

  has(token: TokenRef): boolean {
    const limit = token.part === "prompt" ? this.promptLength : this.answerLength;
    return token.index >= 0 && token.index < limit;
  }

  apply(event: RunEvent): void {
    this.version += 1;
    switch (event.kind) {
      case "steering":
        this.echo = event.data.clairai;
        return;
      case "token":
        this.#addTokens(event.data);
        return;
      case "probe_update":
        this.#addScores(event.data);
        return;
      case "probe_final":
        if (event.data.choice === CHOICE) this.#finish(event.data);
        return;
      case "done":
        this.done = event.data;
        return;
      case "error":
        return;
    }
  }

  #addTokens(data: TokenEvent): void {
    if (data.choice !== CHOICE) return;
    const known = data.part === "prompt" ? this.promptLength : this.answerLength;
    if (data.start !== known) {
      throw new ProtocolError(`${data.part} token ${data.start} arrived, but ${known} was expected`);
    }
    if (data.part === "prompt") this.#insertPrompt(data);
    else this.#append(data);
    this.scores.extend(this.tokens.length);
  }

  #append(data: TokenEvent): void {
    this.#push(data.tokens, data.token_ids);
    this.text += data.text;
  }

  /** The answer's first tokens may have arrived already; they stay behind the prompt. */
  #insertPrompt(data: TokenEvent): void {
    const tokensAfter = this.tokens.splice(this.promptLength);
    const idsAfter = this.ids.splice(this.promptLength);
    if (tokensAfter.length > 0) this.scores.insert(this.promptLength, data.tokens.length);
    this.#push(data.tokens, data.token_ids);
    this.#push(tokensAfter, idsAfter);
    this.promptLength += data.tokens.length;
  }

  // One by one, because a long prompt spread into arguments would overflow the stack.
  #push(tokens: readonly string[], ids: readonly number[]): void {
    for (const token of tokens) this.tokens.push(token);
    for (const id of ids) this.ids.push(id);
  }

  #addScores(data: ProbeUpdateEvent): void {
    if (data.choice !== CHOICE) return;
    const offset = data.part === "prompt" ? 0 : this.promptLength;
    const limit = data.part === "prompt" ? this.promptLength : this.tokens.length;
    if (offset + data.start + data.scores.length > limit) {
      throw new ProtocolError(`Scores arrived for ${data.part} tokens that have not arrived.`);
    }
    for (const { kind, start, span } of data.media ?? []) {
      for (let row = start; row < Math.min(start + span, limit); row += 1) this.media.set(row, kind);
    }
    this.scores.declare(data.names);
    for (const [i, row] of data.scores.entries()) {
      this.scores.put(offset + data.start + i, data.names, row);
    }
    this.lost += data.lost ?? 0;
  }

  #finish(data: ProbeFinalEvent): void {
    this.final = data;
    this.lost = Math.max(this.lost, data.lost);
    this.scores.declare(data.names);
  }
}
