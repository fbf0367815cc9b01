// Types of the steering API: vectors, entries, gates, stop rules and tiers.
import type { components } from "./schema";

type Schemas = components["schemas"];

export type Op = Schemas["SteerEntry"]["op"];
export type Phase = Schemas["Window"]["phase"];
export type VectorInfo = Schemas["VectorInfo"];
export type VectorList = Schemas["VectorList"];

/** From the first position up to, not including, the second; null means no end. */
export type PositionRange = [number, number | null];

export type When = Phase | { phase: Phase; positions?: PositionRange[]; skip_special?: boolean };

export interface SteerGate {
  probe: string;
  /** If omitted, the probe's own threshold. */
  threshold?: number;
  /** If omitted, the gate is either open or closed. */
  sharpness?: number;
  latch?: boolean;
  release?: number;
}

/** As the page sends it; the schema's own type has every default filled in. */
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
  /** How many consecutive tokens. */
  tokens: number;
  /** The actions that the page offers, of those the server knows. */
  action: Extract<Schemas["StopRule"]["action"], "stop" | "alert">;
}

/** As the server reports it: an inline vector has a digest and no name. */
export type AppliedEntry = Partial<Omit<SteerEntry, "vector">> & {
  vector?: unknown;
  digest?: string;
  /** Set for an entry that steers every request. */
  tier?: Tier;
};

/** What the engine applies to a run; the thresholds of stop rules are resolved here. */
export interface Echo {
  steering: AppliedEntry[];
  stop?: StopRule[] | null;
}

export const TIERS = ["base", "prefill", "decode"] as const;
export type Tier = (typeof TIERS)[number];
export type Tiers = Record<Tier, AppliedEntry[]>;
