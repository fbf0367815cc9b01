// Parses and checks one server-sent event of a run.
import type { Echo } from "./steering";
import type { DoneEvent, ErrorDetail, ProbeFinalEvent, ProbeUpdateEvent, TokenEvent } from "./types";

/** The first event of a run that is steered, or stopped by a rule. */
export interface SteeringEvent {
  clairai: Echo;
}

export type RunEvent =
  | { kind: "steering"; data: SteeringEvent }
  | { kind: "token"; data: TokenEvent }
  | { kind: "probe_update"; data: ProbeUpdateEvent }
  | { kind: "probe_final"; data: ProbeFinalEvent }
  | { kind: "done"; data: DoneEvent }
  | { kind: "error"; data: { error: ErrorDetail } };

/** The stream violates the protocol; continuing would show wrong scores. */
export class ProtocolError extends Error {
  override name = "ProtocolError";
}

/** The event, or null if this page does not know its kind. */
export function decode(kind: string, text: string): RunEvent | null {
  switch (kind) {
    case "steering":
      return { kind, data: parsed(text) as SteeringEvent };
    case "token":
      return { kind, data: checkedToken(parsed(text) as TokenEvent) };
    case "probe_update":
      return { kind, data: checkedUpdate(parsed(text) as ProbeUpdateEvent) };
    case "probe_final":
      return { kind, data: parsed(text) as ProbeFinalEvent };
    case "done":
      return { kind, data: parsed(text) as DoneEvent };
    case "error":
      return { kind, data: checkedError(parsed(text) as { error?: ErrorDetail }) };
    default:
      return null;
  }
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    throw new ProtocolError(`An event was not JSON: ${text.slice(0, 80)}`);
  }
}

function checkedToken(data: TokenEvent): TokenEvent {
  if (data.tokens.length !== data.token_ids.length) {
    throw new ProtocolError(`${data.tokens.length} texts for ${data.token_ids.length} token ids`);
  }
  return data;
}

function checkedUpdate(data: ProbeUpdateEvent): ProbeUpdateEvent {
  const bad = data.scores.find((row) => row.length !== data.names.length);
  if (bad) throw new ProtocolError(`${bad.length} scores for ${data.names.length} probes`);
  return data;
}

function checkedError(data: { error?: ErrorDetail }): { error: ErrorDetail } {
  const error = data.error ?? { message: "The run failed.", type: "error", param: null, code: null };
  return { error };
}

export function isLast(event: RunEvent): boolean {
  return event.kind === "done" || event.kind === "error";
}
