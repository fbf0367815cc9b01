// The series of scores that line chart and matrix draw, on one axis of tokens.
import type { ProbeInfo } from "../../api/types";
import { domainOf, type Domain } from "../../colour/domain";
import type { Transcript } from "../../data/transcript";

/** Token 0 is the answer's first; the prompt's tokens are negative. */
export interface Trace {
  key: string;
  label: string;
  values: Float64Array;
  /** The token of `values[0]`. */
  start: number;
  domain: Domain;
  /** The range of the chart's axis: 0 to 1 if scores are probabilities. */
  axis: readonly [number, number];
  threshold: number | null;
}

export interface Extent {
  from: number;
  /** One past the last token. */
  to: number;
}

export function traceOf(
  transcript: Transcript,
  probe: ProbeInfo,
  key: string = probe.name,
  label: string = probe.name,
): Trace {
  const domain = domainOf(probe);
  return {
    key,
    label,
    values: transcript.scores.column(probe.name),
    start: -transcript.promptLength,
    domain,
    axis: probe.activation === "sigmoid" ? [0, 1] : [domain.low, domain.high],
    threshold: probe.threshold,
  };
}

export function extentOf(transcripts: readonly Transcript[]): Extent {
  let [from, to] = [0, 0];
  for (const transcript of transcripts) {
    from = Math.min(from, -transcript.promptLength);
    to = Math.max(to, transcript.answerLength);
  }
  return { from, to };
}

export function clipped(extent: Extent, span: readonly [number, number] | null): Extent {
  if (!span) return extent;
  const from = Math.max(extent.from, span[0]);
  const to = Math.min(extent.to, span[1]);
  return to > from ? { from, to } : extent;
}

/** b minus a, token by token; NaN if either has no score. */
export function difference(a: Trace, b: Trace): Trace {
  const start = Math.max(a.start, b.start);
  const end = Math.min(a.start + a.values.length, b.start + b.values.length);
  const values = new Float64Array(Math.max(0, end - start));
  for (let i = 0; i < values.length; i += 1) {
    values[i] = (b.values[start + i - b.start] ?? NaN) - (a.values[start + i - a.start] ?? NaN);
  }
  const reach = Math.max(a.domain.high - a.domain.low, b.domain.high - b.domain.low);
  const domain: Domain = { low: -reach, high: reach, neutral: 0, isDiverging: true, source: a.domain.source };
  return { key: "difference", label: "B − A", values, start, domain, axis: [-reach, reach], threshold: null };
}

/** Whether all lines can share one axis. */
export function isCommon(traces: readonly Trace[]): boolean {
  const [first] = traces;
  return traces.every(({ axis }) => axis[0] === first?.axis[0] && axis[1] === first.axis[1]);
}

/** The values of a trace over the whole extent; NaN where it has none. */
export function spread(trace: Trace, extent: Extent): Float64Array {
  const length = extent.to - extent.from;
  if (trace.start === extent.from && trace.values.length === length) return trace.values;
  const values = new Float64Array(length).fill(NaN);
  values.set(
    trace.values.subarray(0, Math.max(0, length - (trace.start - extent.from))),
    trace.start - extent.from,
  );
  return values;
}
