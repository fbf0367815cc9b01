// The share of a probe's reference scores that lie below a value.
import type { Histogram } from "../../api/types";

/** The scores in a bin count as evenly spread. */
export function rankOf({ low, high, counts }: Histogram, value: number): number {
  const total = counts.reduce((sum, bar) => sum + bar, 0);
  if (total === 0 || Number.isNaN(value) || value <= low) return 0;
  if (value >= high) return 1;
  const place = ((value - low) / (high - low)) * counts.length;
  const bin = Math.floor(place);
  const below = counts.slice(0, bin).reduce((sum, bar) => sum + bar, 0);
  return (below + (place - bin) * (counts[bin] ?? 0)) / total;
}
