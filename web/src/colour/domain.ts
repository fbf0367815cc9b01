// The fixed range in which a probe's scores are coloured, and its neutral point.
import type { ProbeInfo } from "../api/types";

/** Fixed before the first token, so that a drawn token never changes its colour. */
export interface Domain {
  low: number;
  high: number;
  /** The score with the neutral colour: the threshold if there is one. */
  neutral: number;
  isDiverging: boolean;
  /** Where the range comes from; the legend shows it. */
  source: "calibration" | "activation" | "assumed";
}

export type ProbeShape = Pick<ProbeInfo, "activation" | "threshold" | "calibration">;

const ASSUMED_REACH = 8;

export function domainOf(probe: ProbeShape): Domain {
  const base = baseOf(probe);
  if (probe.threshold === null) return withoutThreshold(probe, base);
  return { ...widened(base, probe.threshold, probe.activation), neutral: probe.threshold, isDiverging: true };
}

type Range = Pick<Domain, "low" | "high" | "source">;

function baseOf(probe: ProbeShape): Range {
  const [low, high] = probe.calibration ?? [NaN, NaN];
  if (low < high) return { low, high, source: "calibration" };
  if (probe.activation === "sigmoid") return { low: 0, high: 1, source: "activation" };
  const floor = probe.activation === "relu" ? 0 : -ASSUMED_REACH;
  return { low: floor, high: ASSUMED_REACH, source: "assumed" };
}

function withoutThreshold(probe: ProbeShape, base: Range): Domain {
  const isSigned = probe.activation === "none" && base.low < 0 && base.high > 0;
  return { ...base, neutral: isSigned ? 0 : base.low, isDiverging: isSigned };
}

/** A threshold at the range's edge leaves one side without room, so that side is widened. */
function widened(base: Range, threshold: number, activation: ProbeShape["activation"]): Range {
  const { source } = base;
  let { low, high } = base;
  const margin = 0.05 * (high - low);
  const isSigmoid = activation === "sigmoid";
  if (threshold > high - margin) {
    high = isSigmoid ? Math.max(1, threshold + margin) : threshold + Math.max(threshold - low, margin);
  }
  if (threshold < low + margin) {
    low = isSigmoid ? Math.min(0, threshold - margin) : threshold - Math.max(high - threshold, margin);
  }
  return { low, high, source };
}

/** Where `value` lies: 0 at low, 0.5 at neutral, 1 at high, clipped outside. */
export function position(domain: Domain, value: number): number {
  const { low, high, neutral } = domain;
  if (value >= neutral) return value >= high ? 1 : 0.5 + (0.5 * (value - neutral)) / (high - neutral);
  return value <= low ? 0 : 0.5 - (0.5 * (neutral - value)) / (neutral - low);
}

/** The position on a linear axis: 0 at low, 1 at high, clipped outside. */
export function fraction(domain: Domain, value: number): number {
  const part = (value - domain.low) / (domain.high - domain.low);
  return part < 0 ? 0 : part > 1 ? 1 : part;
}

export function isOver(threshold: number | null, value: number): boolean {
  return threshold !== null && value >= threshold;
}

/** Rounds a number that is negligible on this scale to 0, which reads better than 6e-7. */
export function edge(domain: Domain, value: number): number {
  return Math.abs(value) < 0.001 * (domain.high - domain.low) ? 0 : value;
}
