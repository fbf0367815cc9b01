// Takes a tape and a probe; gives the class names that colour each token.
import type { ProbeInfo } from "../../api/types";
import { domainOf, position } from "../../colour/domain";
import { bucketOf } from "../../colour/ramp";
import type { Tape } from "../../data/tape";

/** The classes of the token in this row; never the text. */
export type Painter = (row: number) => string;

export function painterOf(tape: Tape, probe: ProbeInfo | null): Painter {
  if (!probe) return () => "";
  const domain = domainOf(probe);
  const column = tape.scores.column(probe.name);
  const threshold = probe.threshold ?? Infinity;
  return (row) => {
    const value = column[row] ?? NaN;
    if (Number.isNaN(value)) return tape.scores.hasArrived(row) ? " none" : " wait";
    const bucket = ` b${bucketOf(position(domain, value))}`;
    return value >= threshold ? `${bucket} over` : bucket;
  };
}
