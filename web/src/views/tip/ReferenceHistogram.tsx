// A histogram of a probe's reference scores, with one score marked in it.
import type { Histogram, ProbeInfo } from "../../api/types";
import { score } from "../../text/number";
import { rankOf } from "./rank";

interface Props {
  probe: ProbeInfo;
  histogram: Histogram;
  value: number;
}

const HEIGHT = 36;

export function ReferenceHistogram({ probe, histogram, value }: Props) {
  return (
    <figure className="reference">
      <Bars probe={probe} histogram={histogram} value={value} />
      <figcaption>
        {Number.isNaN(value) ? (
          `${probe.name} on reference texts`
        ) : (
          <>
            <strong className="number">{score(value)}</strong> is higher than{" "}
            {percent(rankOf(histogram, value))} of reference tokens
          </>
        )}
      </figcaption>
    </figure>
  );
}

export function Bars({ probe, histogram, value }: Props) {
  const { low, high, counts } = histogram;
  const tallest = counts.reduce((most, bar) => Math.max(most, bar), 1);
  const width = 100 / counts.length;
  const at = (x: number) => Math.min(100, Math.max(0, (100 * (x - low)) / (high - low)));
  return (
    <svg className="bars" viewBox={`0 0 100 ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
      {counts.map((bar, i) => {
        // The square root keeps the few high scores visible beside the many low ones.
        const height = bar === 0 ? 0 : Math.max(1, HEIGHT * Math.sqrt(bar / tallest));
        const place = { x: i * width, y: HEIGHT - height, width: width * 0.86, height };
        return <rect key={i} className="reference-bar" {...place} />;
      })}
      {probe.threshold !== null && (
        <rect className="reference-threshold" x={at(probe.threshold)} y="0" width="0.5" height={HEIGHT} />
      )}
      {!Number.isNaN(value) && (
        <rect className="reference-value" x={at(value) - 0.5} y="0" width="1.2" height={HEIGHT} />
      )}
    </svg>
  );
}

function percent(rank: number): string {
  const value = 100 * rank;
  if (value > 99.9 && value < 100) return "more than 99.9%";
  return `${value.toFixed(value < 99 ? 0 : 1)}%`;
}
