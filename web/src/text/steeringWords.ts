// Describes steering entries and stop rules in one line of text.
import {
  TIERS,
  type AppliedEntry,
  type Phase,
  type PositionRange,
  type SteerGate,
  type StopRule,
  type Tier,
  type Tiers,
  type When,
} from "../api/steering";
import { rangesText } from "../data/ranges";
import { exact, counted } from "./number";

const PHASES: Record<Phase, string> = {
  both: "on every token",
  prompt: "in the prompt",
  generation: "in the answer",
  last_prompt: "at the last prompt token",
};
/** A tier limits its entries to its own phase. */
const TIER_PHASES: Record<Tier, Phase> = { base: "both", prefill: "prompt", decode: "generation" };

export function entryWords(entry: AppliedEntry): string {
  const parts = [
    actWords(entry),
    entry.points ? `at ${entry.points.join(", ")}` : "",
    whenWords(entry.when ?? "both", entry.tier ?? "base"),
    entry.gate ? gateWords(entry.gate) : "",
  ];
  return parts.filter(Boolean).join(" ");
}

/** The vector and the operation, without where and when. */
export function actWords(entry: AppliedEntry): string {
  const name = typeof entry.vector === "string" && entry.vector !== "" ? entry.vector : "an inline vector";
  const scale = entry.scale ?? 1;
  switch (entry.op ?? "add") {
    case "add":
      return `${name} ${scale < 0 ? "" : "+"}${exact(scale)}${entry.match_norm ? " of the norm" : ""}`;
    case "ablate":
      return `${name} ablated${strength(scale)}`;
    case "clamp":
      return `${name} clamped${bounds(entry)}${strength(scale)}`;
    case "replace":
      return `replaced by ${name}${strength(scale)}`;
  }
}

function strength(scale: number): string {
  return scale === 1 ? "" : ` × ${exact(scale)}`;
}

function bounds({ low, high }: AppliedEntry): string {
  const parts = [low == null ? "" : ` ≥ ${exact(low)}`, high == null ? "" : ` ≤ ${exact(high)}`];
  return parts.filter(Boolean).join(" and");
}

export function whenWords(when: When, tier: Tier = "base"): string {
  const given = typeof when === "string" ? { phase: when } : when;
  const phase = given.phase === "both" ? TIER_PHASES[tier] : given.phase;
  const isSome = given.positions != null && !isAll(given.positions);
  const parts = [
    isSome && phase === "both" ? "" : PHASES[phase],
    isSome && given.positions ? `at positions ${rangesText(given.positions)}` : "",
    given.skip_special ? "without special tokens" : "",
  ];
  return parts.filter(Boolean).join(", ");
}

function isAll(positions: readonly PositionRange[]): boolean {
  return positions.some(([from, to]) => from === 0 && to === null);
}

export function gateWords(gate: SteerGate): string {
  const threshold = gate.threshold == null ? "its threshold" : exact(gate.threshold);
  const how = [
    gate.sharpness == null ? "" : `sharpness ${exact(gate.sharpness)}`,
    gate.latch ? "latched" : "",
    gate.release == null ? "" : `until below ${exact(gate.release)}`,
  ].filter(Boolean);
  const word = gate.sharpness == null ? "while" : "gradually while";
  return `${word} ${gate.probe} ≥ ${threshold}${how.length > 0 ? ` (${how.join(", ")})` : ""}`;
}

export function ruleWords(rule: StopRule): string {
  return `${rule.action} at ${conditionWords(rule, rule.threshold ?? null)}`;
}

export function conditionWords({ probe, tokens }: StopRule, threshold: number | null): string {
  const bar = threshold === null ? "its threshold" : exact(threshold);
  return `${probe} ≥ ${bar} for ${counted(tokens, "token")}`;
}

/** Empty if no tier steers. */
export function tierWords(tiers: Tiers): string {
  return TIERS.filter((tier) => tiers[tier].length > 0)
    .map((tier) => `${tier}: ${tiers[tier].map((entry) => entryWords({ ...entry, tier })).join("; ")}`)
    .join(". ");
}
