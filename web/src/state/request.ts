// Builds the request body of a question, for the page and for copies.
import type { SteerEntry, StopRule } from "../api/steering";
import type { ClairaiFields, Message } from "../api/types";
import { entriesOf, faultsOf, type Catalog } from "../data/entryDraft";
import { ruleFault, rulesOf } from "../data/rules";
import type { Draft, Run, Sampling, State } from "./types";

export interface CompletionBody {
  model: string;
  messages: Message[];
  stream: true;
  clairai: Omit<ClairaiFields, "steer" | "stop" | "capture" | "label" | "stream"> & {
    steer?: SteerEntry[];
    stop?: StopRule[];
  };
  [setting: string]: unknown;
}

export const CHAT_PATH = "v1/chat/completions";
/** The seed of two compared runs if none is set, so that they do not differ by chance. */
export const PAIR_SEED = 1;

/** The fields of a run that go into its request. */
export type RequestParts = Pick<Run, "model" | "sampling" | "steer" | "stop">;

/** `answers[i]` is the model's answer in `path[i]`; the last run of the path is the new one. */
export function messagesOf(
  path: readonly Pick<Run, "user" | "system">[],
  answers: readonly string[],
): Message[] {
  const last = path.at(-1);
  if (!last) return [];
  const before = path.slice(0, -1).flatMap((run, i): Message[] => [
    { role: "user", content: run.user },
    { role: "assistant", content: answers[i] ?? "" },
  ]);
  const system: Message[] = last.system.trim() === "" ? [] : [{ role: "system", content: last.system }];
  return [...system, ...before, { role: "user", content: last.user }];
}

export function bodyOf(run: RequestParts, messages: Message[]): CompletionBody {
  return {
    model: run.model,
    messages,
    stream: true,
    ...samplingFields(run.sampling),
    clairai: {
      probes: "all",
      prompt_scores: true,
      events: "named",
      ...(run.steer.length > 0 ? { steer: run.steer } : {}),
      ...(run.stop.length > 0 ? { stop: run.stop } : {}),
    },
  };
}

/** Only the settings that were set; the server decides the rest. */
export function samplingFields(sampling: Sampling): Partial<Sampling> {
  const entries = Object.entries(sampling).filter(
    ([, value]) => value !== null && !(Array.isArray(value) && value.length === 0),
  );
  return Object.fromEntries(entries);
}

/** The settings of the draft's requests: one, or two of which the first is not steered. */
export function requestsOf(draft: Draft, isPairWanted: boolean): Pick<Run, "sampling" | "steer" | "stop">[] {
  const { sampling } = draft;
  const [steer, stop] = [entriesOf(draft.entries), rulesOf(draft.rules)];
  if (steer.length === 0 || !isPairWanted) return [{ sampling, steer, stop }];
  const seeded = { ...sampling, seed: sampling.seed ?? PAIR_SEED };
  return [
    { sampling: seeded, steer: [], stop },
    { sampling: seeded, steer, stop },
  ];
}

/** The draft's question and the turn it follows; in a comparison it replaces the compared question. */
export function nextQuestion(state: Pick<State, "draft" | "head" | "versus" | "runs">): {
  parent: string | null;
  user: string;
} {
  const { draft, head, versus, runs } = state;
  const compared = head === null || versus === null ? undefined : runs[head];
  const user = draft.user.trim() || (compared?.user ?? "");
  return { parent: compared ? compared.parent : head, user };
}

export function isPair(draft: Draft): boolean {
  return draft.isPaired && entriesOf(draft.entries).length > 0;
}

/** The faults of the draft's entries and rules; empty if it can be sent. */
export function draftFaults(state: Pick<State, "draft" | "steering" | "probes">): string[] {
  const { entries, rules } = state.draft;
  const catalog = catalogOf(state);
  const ofEntries = entries.filter(({ scale }) => scale !== 0).flatMap((entry) => faultsOf(entry, catalog));
  return [...ofEntries, ...rules.flatMap((rule) => ruleFault(rule, catalog.probes) ?? [])];
}

export function catalogOf({ steering, probes }: Pick<State, "steering" | "probes">): Catalog {
  const known = steering.kind === "on" ? steering : { vectors: [], points: [] };
  return { vectors: known.vectors, points: known.points, probes: probes ?? [] };
}
