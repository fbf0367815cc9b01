// Colours and dashes of the chart's lines, distinguishable without colour too.
import { schemeObservable10 } from "d3-scale-chromatic";
import { readable, type Theme } from "./ramp";

export const MAX_LINES = 8;

// The order in which colours are used: neighbours differ in hue and in lightness.
const ORDER = [1, 0, 4, 3, 6, 2, 8, 5] as const;
/** Colours that some people cannot tell apart are four apart; the second of them is dashed. */
const DASH = [5, 3] as const;

export interface LineStyle {
  colour: string;
  dash: readonly number[];
}

export function lineStyle(theme: Theme, slot: number): LineStyle {
  const colour = schemeObservable10[ORDER[slot % MAX_LINES] ?? 0] ?? "#888888";
  return { colour: readable(theme, colour), dash: slot % MAX_LINES < MAX_LINES / 2 ? [] : DASH };
}
