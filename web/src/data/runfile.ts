// Takes a run and its tape; gives one plain object that says all of it, and reads such an object back.
import type { Echo } from "../api/steering";
import type { DoneEvent, Part, ProbeFinalEvent, ProbeInfo } from "../api/types";
import type { Run } from "../state/types";
import { Tape } from "./tape";

export const FORMAT = "clairai-run/1";

/** null: no row has come. A score that is null: a row has come, without this score. */
type Row = (number | null)[] | null;

export interface PartFile {
  token_ids: number[];
  tokens: string[];
  scores: Row[];
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
  /** What the engine says it did; null where it said nothing. */
  echo?: Echo | null;
  final: ProbeFinalEvent | null;
  done: DoneEvent | null;
}

export function toFile(run: Run, tape: Tape): RunFile {
  const { probes, ...rest } = run;
  const names = [...tape.scores.names];
  return {
    format: FORMAT,
    run: rest,
    probes,
    names,
    prompt: partOf(tape, names, 0, tape.promptLength),
    answer: partOf(tape, names, tape.promptLength, tape.length),
    text: tape.text,
    lost: tape.lost,
    echo: tape.echo,
    final: tape.final,
    done: tape.done,
  };
}

function partOf(tape: Tape, names: string[], from: number, to: number): PartFile {
  return {
    token_ids: tape.ids.slice(from, to),
    tokens: tape.tokens.slice(from, to),
    scores: Array.from({ length: to - from }, (_, i) => rowOf(tape, names, from + i)),
  };
}

function rowOf(tape: Tape, names: string[], row: number): Row {
  if (!tape.scores.hasArrived(row)) return null;
  return names.map((name) => {
    const value = tape.scores.value(name, row);
    return Number.isNaN(value) ? null : value;
  });
}

export class RunFileError extends Error {
  override name = "RunFileError";
}

export function fromFile(file: RunFile): { run: Run; tape: Tape } {
  if ((file.format as string) !== FORMAT) {
    throw new RunFileError(`This is no ${FORMAT} file but ${file.format}.`);
  }
  const tape = new Tape();
  addPart(tape, "prompt", file.prompt, file.names, "");
  addPart(tape, "answer", file.answer, file.names, file.text);
  tape.scores.declare(file.names);
  tape.lost = file.lost;
  tape.echo = file.echo ?? null;
  tape.final = file.final;
  tape.done = file.done;
  return { run: runOf(file.run, file.probes), tape };
}

/** Runs that were kept before there was steering do not speak of it. */
export function runOf(kept: RunFile["run"], probes: ProbeInfo[]): Run {
  const { steer = [], stop = [] } = kept as Partial<Run>;
  return { ...kept, steer, stop, probes };
}

function addPart(tape: Tape, part: Part, file: PartFile, names: string[], text: string): void {
  const { tokens, token_ids } = file;
  tape.apply({ kind: "token", data: { part, choice: 0, start: 0, tokens, token_ids, text } });
  for (const [start, row] of file.scores.entries()) {
    if (row === null) continue;
    tape.apply({ kind: "probe_update", data: { part, choice: 0, names, start, scores: [row], lost: null } });
  }
}
