// Stop rules: their form in the panel, the request fields, and the tokens at which they fired.
import type { StopRule } from "../api/steering";
import type { ProbeInfo } from "../api/types";
import type { Transcript } from "./transcript";

export interface RuleDraft {
  id: number;
  probe: string;
  /** null: the probe's own threshold. */
  threshold: number | null;
  tokens: number | null;
  action: StopRule["action"];
}

export interface Firing {
  rule: StopRule;
  threshold: number;
  /** The tokens of the answer at which the rule fired. */
  indices: number[];
}

export const MAX_RULES = 16;
const MAX_TOKENS = 1000;

export function rulesOf(drafts: readonly RuleDraft[]): StopRule[] {
  return drafts.map(({ probe, threshold, tokens, action }) => ({
    probe,
    ...(threshold === null ? {} : { threshold }),
    tokens: tokens ?? NaN,
    action,
  }));
}

export function ruleFault(draft: RuleDraft, probes: readonly ProbeInfo[]): string | null {
  const probe = probes.find(({ name }) => name === draft.probe);
  if (!probe) return "Choose a probe.";
  if (draft.threshold === null && probe.threshold === null) {
    return `${probe.name} has no threshold of its own: set one.`;
  }
  const tokens = draft.tokens ?? 0;
  const isGood = Number.isInteger(tokens) && tokens >= 1 && tokens <= MAX_TOKENS;
  return isGood ? null : `Set a whole number of tokens from 1 to ${MAX_TOKENS}.`;
}

/** The rules that fired on the scores so far. A token without a score restarts the count. */
export function firings(
  transcript: Transcript,
  rules: readonly StopRule[],
  probes: readonly ProbeInfo[],
): Firing[] {
  return rules.flatMap((rule, i) => {
    const own = probes.find(({ name }) => name === rule.probe)?.threshold ?? null;
    const threshold = transcript.echo?.stop?.[i]?.threshold ?? rule.threshold ?? own;
    const indices = threshold === null ? [] : firedAt(transcript, rule, threshold);
    return threshold === null || indices.length === 0 ? [] : [{ rule, threshold, indices }];
  });
}

function firedAt(transcript: Transcript, rule: StopRule, threshold: number): number[] {
  const column = transcript.scores.column(rule.probe);
  const indices: number[] = [];
  let numOver = 0;
  for (
    let row = transcript.promptLength;
    row < column.length && transcript.scores.hasArrived(row);
    row += 1
  ) {
    numOver = (column[row] ?? NaN) >= threshold ? numOver + 1 : 0;
    if (numOver === rule.tokens) indices.push(row - transcript.promptLength);
  }
  // The answer stops at the first one; tokens sampled before the stop took effect do not count.
  return rule.action === "stop" ? indices.slice(0, 1) : indices;
}

/** The reason given by a stop rule that ended an answer; null for any other end. */
export function stopWords(reason: unknown): string | null {
  if (typeof reason !== "string" || !reason.startsWith("clairai: ")) return null;
  return reason.slice("clairai: ".length);
}

export function ruleDraftOf(id: number, found: unknown): RuleDraft | null {
  if (typeof found !== "object" || found === null) return null;
  const { probe, threshold, tokens, action } = found as Partial<StopRule>;
  if (typeof probe !== "string" || (action !== "stop" && action !== "alert")) return null;
  return {
    id,
    probe,
    threshold: typeof threshold === "number" && Number.isFinite(threshold) ? threshold : null,
    tokens: Number.isInteger(tokens) ? (tokens ?? 1) : 1,
    action,
  };
}
