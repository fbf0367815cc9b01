// Saves a run with its transcript as one plain object, and loads it again.
import type { Echo } from "../api/steering";
import type { DoneEvent, Part, ProbeFinalEvent, ProbeInfo, PromptMedia } from "../api/types";
import type { Run } from "../state/types";
import { Transcript } from "./transcript";

export const FORMAT = "clairai-run/1";

/** A null row has not arrived; a null score in a row means that the probe has no score there. */
type Row = (number | null)[] | null;

export interface PartFile {
  token_ids: number[];
  tokens: string[];
  scores: Row[];
  /** Tokens of a prompt that stand for parts of images or sounds; left out if all are text. */
  media?: PromptMedia[];
}

export interface RunFile {
  format: typeof FORMAT;
  run: Omit<Run, "probes">;
  probes: ProbeInfo[];
  /** The columns of every row of scores. */
  names: string[];
  prompt: PartFile;
  answer: PartFile;
  text: string;
  lost: number;
  /** The steering that the engine reported; null if it reported none. */
  echo?: Echo | null;
  final: ProbeFinalEvent | null;
  done: DoneEvent | null;
}

export function toFile(run: Run, transcript: Transcript): RunFile {
  const { probes, ...rest } = run;
  const names = [...transcript.scores.names];
  return {
    format: FORMAT,
    run: rest,
    probes,
    names,
    prompt: { ...partOf(transcript, names, 0, transcript.promptLength), ...mediaOf(transcript) },
    answer: partOf(transcript, names, transcript.promptLength, transcript.length),
    text: transcript.text,
    lost: transcript.lost,
    echo: transcript.echo,
    final: transcript.final,
    done: transcript.done,
  };
}

function mediaOf(transcript: Transcript): Pick<PartFile, "media"> {
  const media = [...transcript.media].map(([start, kind]) => ({ kind, start, span: 1 }));
  return media.length > 0 ? { media: joined(media) } : {};
}

/** Neighbours of one kind as one span. */
function joined(media: readonly PromptMedia[]): PromptMedia[] {
  const spans: PromptMedia[] = [];
  for (const one of [...media].sort((a, b) => a.start - b.start)) {
    const last = spans.at(-1);
    if (last?.kind === one.kind && last.start + last.span === one.start) last.span += one.span;
    else spans.push({ ...one });
  }
  return spans;
}

function partOf(transcript: Transcript, names: string[], from: number, to: number): PartFile {
  return {
    token_ids: transcript.ids.slice(from, to),
    tokens: transcript.tokens.slice(from, to),
    scores: Array.from({ length: to - from }, (_, i) => rowOf(transcript, names, from + i)),
  };
}

function rowOf(transcript: Transcript, names: string[], row: number): Row {
  if (!transcript.scores.hasArrived(row)) return null;
  return names.map((name) => {
    const value = transcript.scores.value(name, row);
    return Number.isNaN(value) ? null : value;
  });
}

export class RunFileError extends Error {
  override name = "RunFileError";
}

export function fromFile(file: RunFile): { run: Run; transcript: Transcript } {
  if ((file.format as string) !== FORMAT) {
    throw new RunFileError(`This file has the format ${file.format}; this page reads ${FORMAT}.`);
  }
  const transcript = new Transcript();
  addPart(transcript, "prompt", file.prompt, file.names, "");
  addPart(transcript, "answer", file.answer, file.names, file.text);
  transcript.scores.declare(file.names);
  transcript.lost = file.lost;
  transcript.echo = file.echo ?? null;
  transcript.final = file.final;
  transcript.done = file.done;
  return { run: runOf(file.run, file.probes), transcript };
}

/** Runs saved before steering existed lack its fields. */
export function runOf(kept: RunFile["run"], probes: ProbeInfo[]): Run {
  const { steer = [], stop = [] } = kept as Partial<Run>;
  return { ...kept, steer, stop, probes };
}

function addPart(transcript: Transcript, part: Part, file: PartFile, names: string[], text: string): void {
  const { tokens, token_ids } = file;
  transcript.apply({ kind: "token", data: { part, choice: 0, start: 0, tokens, token_ids, text } });
  if (file.media) {
    const data = { part, choice: 0, names: [], start: 0, scores: [], lost: null, media: file.media };
    transcript.apply({ kind: "probe_update", data });
  }
  for (const [start, row] of file.scores.entries()) {
    if (row === null) continue;
    transcript.apply({
      kind: "probe_update",
      data: { part, choice: 0, names, start, scores: [row], lost: null },
    });
  }
}
