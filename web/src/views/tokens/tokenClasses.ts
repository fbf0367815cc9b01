// The CSS classes that colour each token by a probe's score.
import type { ProbeInfo } from "../../api/types";
import { domainOf, position } from "../../colour/domain";
import { bucketOf } from "../../colour/ramp";
import type { Transcript } from "../../data/transcript";

/** The CSS classes of the token in this row. */
export type TokenClasses = (row: number) => string;

export function tokenClasses(transcript: Transcript, probe: ProbeInfo | null): TokenClasses {
  if (!probe) return () => "";
  const domain = domainOf(probe);
  const column = transcript.scores.column(probe.name);
  const threshold = probe.threshold ?? Infinity;
  return (row) => {
    const value = column[row] ?? NaN;
    if (Number.isNaN(value)) return transcript.scores.hasArrived(row) ? " none" : " wait";
    const bucket = ` b${bucketOf(position(domain, value))}`;
    return value >= threshold ? `${bucket} over` : bucket;
  };
}
