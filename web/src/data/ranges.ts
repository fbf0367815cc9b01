// Parses and formats token positions as the user types them, such as "0:4, -3:".
import type { Phase, PositionRange } from "../api/steering";

const RANGE = /^(-?\d{1,7})\s*:\s*(-?\d{1,7})?$/;
const PLACE = /^-?\d{1,7}$/;

export type Ranges = { ranges: PositionRange[]; fault: null } | { ranges: null; fault: string };

export function rangesOf(text: string, phase: Phase): Ranges {
  const ranges: PositionRange[] = [];
  for (const part of text.split(",").map((each) => each.trim())) {
    if (part === "") continue;
    const range = rangeOf(part);
    if (typeof range === "string") return { ranges: null, fault: range };
    const isNegative = range[0] < 0 || (range[1] ?? 0) < 0;
    if (isNegative && phase === "generation") {
      return { ranges: null, fault: `${part}: positions cannot count back from the end of an answer.` };
    }
    ranges.push(range);
  }
  return { ranges, fault: null };
}

function rangeOf(part: string): PositionRange | string {
  if (PLACE.test(part)) {
    const place = Number(part);
    return place === -1 ? "-1: write -1: for the last prompt token and all after it." : [place, place + 1];
  }
  const match = RANGE.exec(part);
  if (!match) return `${part}: positions are written as 0:4 or -3: or 7.`;
  const [from, to] = [Number(match[1]), match[2] === undefined ? null : Number(match[2])];
  const isComparable = to !== null && from < 0 === to < 0;
  return to === 0 || (isComparable && to <= from) ? `${part}: this range is empty.` : [from, to];
}

export function rangesText(ranges: readonly PositionRange[]): string {
  return ranges.map(([from, to]) => `${from}:${to ?? ""}`).join(", ");
}
