// The types of the page's state.
import type { EngineDescription, Example, Health, ProbeInfo } from "../api/types";
import type { StopRule, SteerEntry, Tiers, VectorInfo } from "../api/steering";
import type { Crossing } from "../data/crossings";
import type { RuleDraft } from "../data/rules";
import type { EntryDraft } from "../data/entryDraft";
import type { TokenRef } from "../data/transcript";

/** null is not sent; the server uses its default. */
export interface Sampling {
  max_tokens: number | null;
  temperature: number | null;
  top_p: number | null;
  top_k: number | null;
  min_p: number | null;
  presence_penalty: number | null;
  frequency_penalty: number | null;
  repetition_penalty: number | null;
  seed: number | null;
  stop: string[];
}

export type RunStatus =
  "opening" | "streaming" | "reconnecting" | "done" | "stopped" | "failed" | "interrupted";

/** A run without its tokens and scores. Runs form a tree: a turn's parent is the turn before it. */
export interface Run {
  id: string;
  parent: string | null;
  createdAt: number;
  serverRun: string | null;
  model: string;
  system: string;
  user: string;
  sampling: Sampling;
  /** As requested; what the engine applied is in the transcript. */
  steer: SteerEntry[];
  stop: StopRule[];
  /** The probes as they were when the run began, with the thresholds that apply to its scores. */
  probes: ProbeInfo[];
  status: RunStatus;
  error: string | null;
}

export type Connection =
  { kind: "connecting" } | { kind: "answered"; health: Health } | { kind: "unreachable"; attempts: number };

/** What is known of the engine's steering. */
export type Steering =
  | { kind: "unknown" }
  /** The engine cannot steer; `reason` is the server's, if it gave one. */
  | { kind: "off"; reason: string | null }
  | { kind: "on"; vectors: VectorInfo[]; points: string[]; tiers: Tiers };

/** The question being written, with its settings. */
export interface Draft {
  user: string;
  system: string;
  sampling: Sampling;
  entries: EntryDraft[];
  rules: RuleDraft[];
  /** Whether a steered question is also asked without steering. */
  isPaired: boolean;
}

export type Pane = "chat" | "charts" | "probes" | "steer" | "history" | "crossings";
export type ThemeChoice = "system" | "light" | "dark";

/** The range of tokens shown in the charts; null means all. */
export type Span = readonly [number, number] | null;

export interface Focus {
  run: string;
  token: TokenRef;
}

export interface State {
  isFrozen: boolean;
  connection: Connection;
  key: { isNeeded: boolean; wasRefused: boolean };
  models: string[];
  model: string | null;
  probes: ProbeInfo[] | null;
  engine: EngineDescription | null;
  examples: Example[];
  runs: Record<string, Run>;
  head: string | null;
  versus: string | null;
  probe: string | null;
  lines: string[];
  pane: Pane;
  span: Span;
  hasMarkdown: boolean;
  hasMarks: boolean;
  hasMono: boolean;
  hasShortcuts: boolean;
  theme: ThemeChoice;
  steering: Steering;
  draft: Draft;
  crossings: Crossing[];
  numCrossingsDropped: number;
  numUnseen: number;
  notice: string | null;
}

export const RUNNING: ReadonlySet<RunStatus> = new Set<RunStatus>(["opening", "streaming", "reconnecting"]);

/** Whether a question asked now would be answered. */
export function isServing({ model, connection }: Pick<State, "model" | "connection">): boolean {
  if (model === null || connection.kind !== "answered") return false;
  return connection.health.status === "ready" || connection.health.status === "degraded";
}

export const NO_SAMPLING: Sampling = {
  max_tokens: 256,
  temperature: null,
  top_p: null,
  top_k: null,
  min_p: null,
  presence_penalty: null,
  frequency_penalty: null,
  repetition_penalty: null,
  seed: null,
  stop: [],
};
