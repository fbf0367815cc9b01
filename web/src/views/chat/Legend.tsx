// The scale of the chosen probe's colours, and the choice of another probe.
import { domainOf, edge, fraction, isOver, type Domain } from "../../colour/domain";
import { colourAt, type Theme } from "../../colour/ramp";
import { position } from "../../colour/domain";
import type { ProbeInfo } from "../../api/types";
import { usePage } from "../../state/page";
import { brief, score } from "../../text/number";
import { ordered } from "../sidebar/probeGroups";
import { probeIn, useRun, useShownFocus, useTheme, useView } from "../hooks";
import { useChartedRun } from "../charts/Charts";

const STEPS = 48;

export function Legend() {
  const page = usePage();
  const probes = useView((state) => state.probes);
  const name = useView((state) => state.probe);
  const run = useRun(useChartedRun());
  const probe = probeIn(run, probes, name);
  if (!probe || !probes) return null;
  return (
    <div className="legend">
      <label>
        <span className="faint">Coloured by</span>{" "}
        <select value={probe.name} onChange={(event) => page.store.setState({ probe: event.target.value })}>
          {ordered(probes).map((each) => (
            <option key={each.name}>{each.name}</option>
          ))}
        </select>
      </label>
      <Scale probe={probe} />
    </div>
  );
}

function Scale({ probe }: { probe: ProbeInfo }) {
  const page = usePage();
  const theme = useTheme();
  const focus = useShownFocus();
  const domain = domainOf(probe);
  const transcript = focus ? page.transcripts.get(focus.run) : null;
  const value =
    focus && transcript ? transcript.scores.value(probe.name, transcript.rowOf(focus.token)) : NaN;
  return (
    <div className="scale" title={sourceOf(domain)}>
      <Ramp domain={domain} theme={theme} value={value} />
      <div className="scale-numbers">
        <span>{brief(edge(domain, domain.low))}</span>
        {domain.isDiverging && (
          <span className="scale-neutral" style={{ left: labelAt(domain, domain.neutral) }}>
            {probe.threshold === null ? brief(domain.neutral) : `threshold ${brief(probe.threshold)}`}
          </span>
        )}
        <span>{brief(edge(domain, domain.high))}</span>
      </div>
      <span className="hidden" aria-live="off">
        {Number.isNaN(value)
          ? ""
          : `${score(value)}${isOver(probe.threshold, value) ? ", over the threshold" : ""}`}
      </span>
    </div>
  );
}

function Ramp({ domain, theme, value }: { domain: Domain; theme: Theme; value: number }) {
  const width = 100 / STEPS;
  return (
    <svg className="ramp" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">
      {Array.from({ length: STEPS }, (_, i) => {
        const at = domain.low + ((i + 0.5) / STEPS) * (domain.high - domain.low);
        return (
          <rect
            key={i}
            x={i * width}
            y="0"
            width={width + 0.3}
            height="10"
            fill={colourAt(theme, position(domain, at))}
          />
        );
      })}
      {domain.isDiverging && <Tick at={fraction(domain, domain.neutral)} name="ramp-neutral" />}
      {!Number.isNaN(value) && <Tick at={fraction(domain, value)} name="ramp-value" />}
    </svg>
  );
}

function Tick({ at, name }: { at: number; name: string }) {
  return <rect className={name} x={Math.min(99.2, 100 * at)} y="0" width="0.8" height="10" />;
}

/** Keeps the label away from the ends, where it would cover the numbers. */
function labelAt(domain: Domain, value: number): string {
  return `${Math.min(70, Math.max(30, 100 * fraction(domain, value)))}%`;
}

function sourceOf(domain: Domain): string {
  if (domain.source === "calibration") return "The range comes from the probe's calibration and is fixed.";
  if (domain.source === "activation")
    return "The probe is not calibrated; the whole range of a sigmoid is shown.";
  return "The probe is not calibrated; this range is assumed. Exact scores are in the tooltip.";
}
