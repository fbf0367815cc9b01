// Types of the steering API: vectors, entries, gates, stop rules and tiers.
import type { components } from "./schema";

type Schemas = components["schemas"];

export type Op = Schemas["SteerEntry"]["op"];
export type Phase = Schemas["Window"]["phase"];
export type VectorInfo = Schemas["VectorInfo"];
export type VectorList = Schemas["VectorList"];

/** From the first position up to, not including, the second; null: on and on. */
export type PositionRange = [number, number | null];

export type When = Phase | { phase: Phase; positions?: PositionRange[]; skip_special?: boolean };

export interface SteerGate {
  probe: string;
  /** Left out: the probe's own. */
  threshold?: number;
  /** Left out: open or closed, nothing between. */
  sharpness?: number;
  latch?: boolean;
  release?: number;
}

/** As the page asks for it; the schema's own type has every default filled in. */
export interface SteerEntry {
  vector: string;
  scale: number;
  op: Op;
  match_norm?: boolean;
  low?: number;
  high?: number;
  points?: string[];
  when?: When;
  gate?: SteerGate;
}

export interface StopRule {
  probe: string;
  threshold?: number;
  /** So many in a row. */
  tokens: number;
  /** Of those the server knows, what the page offers. */
  action: Extract<Schemas["StopRule"]["action"], "stop" | "alert">;
}

/** As the server says it: of what came inline there is a digest and no name. */
export type AppliedEntry = Partial<Omit<SteerEntry, "vector">> & {
  vector?: unknown;
  digest?: string;
  /** Of one that steers every request. */
  tier?: Tier;
};

/** What the engine says it does to a run; thresholds of rules are known here. */
export interface Echo {
  steering: AppliedEntry[];
  stop?: StopRule[] | null;
}

export const TIERS = ["base", "prefill", "decode"] as const;
export type Tier = (typeof TIERS)[number];
export type Tiers = Record<Tier, AppliedEntry[]>;
