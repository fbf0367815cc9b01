// Steering entries as they are set in the panel: their request fields and their faults.
import type { Op, Phase, PositionRange, SteerEntry, SteerGate, VectorInfo, When } from "../api/steering";
import type { ProbeInfo } from "../api/types";
import { isBehind } from "../text/point";
import { rangesOf, rangesText } from "./ranges";

export interface GateDraft {
  probe: string;
  /** null: the probe's own threshold. */
  threshold: number | null;
  /** null: the gate is either open or closed. */
  sharpness: number | null;
  isLatched: boolean;
  release: number | null;
}

/** One steering entry as it is set in the panel; null is an empty field. */
export interface EntryDraft {
  id: number;
  vector: string;
  scale: number | null;
  op: Op;
  isMatched: boolean;
  low: number | null;
  high: number | null;
  /** null: all points of the vector. */
  points: string[] | null;
  phase: Phase;
  /** As the user typed it. */
  positions: string;
  skipsSpecial: boolean;
  gate: GateDraft | null;
}

export const MAX_ENTRIES = 32;
/** The default scale with matched norms: at 1 the vector would be as long as the row. */
const MATCHED_SCALE = 0.25;

export function freshEntry(id: number, vector: Pick<VectorInfo, "name" | "scale">): EntryDraft {
  return {
    id,
    vector: vector.name,
    scale: vector.scale,
    op: "add",
    isMatched: false,
    low: null,
    high: null,
    points: null,
    phase: "both",
    positions: "",
    skipsSpecial: false,
    gate: null,
  };
}

export function nextId(drafts: readonly { id: number }[]): number {
  return drafts.reduce((most, { id }) => Math.max(most, id), 0) + 1;
}

/** Change the operation, and with it the scale to that operation's default. */
export function withOp(entry: EntryDraft, op: Op, isMatched: boolean, suggested: number): EntryDraft {
  if (op === entry.op && isMatched === entry.isMatched) return entry;
  const scale = op !== "add" ? 1 : isMatched ? MATCHED_SCALE : suggested;
  const isNegative = (entry.scale ?? 0) < 0 && op === "add";
  return { ...entry, op, isMatched, scale: isNegative ? -Math.abs(scale) : scale };
}

/** The slider's range to either side of 0. The field beside it accepts any number. */
export function reachOf(entry: Pick<EntryDraft, "op" | "isMatched">, suggested: number): number {
  if (entry.op !== "add") return 2;
  if (entry.isMatched) return 1;
  const reach = 3 * Math.abs(suggested);
  return reach > 0 && Number.isFinite(reach) ? reach : 1;
}

/** The slider's step: about a hundredth of its range, as a round number. */
export function stepOf(reach: number): number {
  return Number((10 ** Math.floor(Math.log10(reach / 50))).toPrecision(1));
}

/** At scale 0 an entry does nothing, so it is not sent. */
export function isOn({ scale }: Pick<EntryDraft, "scale">): boolean {
  return scale !== 0;
}

/** The request's entries. Defaults are omitted, except for scale and op. */
export function entriesOf(drafts: readonly EntryDraft[]): SteerEntry[] {
  return drafts.filter(isOn).map(entryOf);
}

export function entryOf(draft: EntryDraft): SteerEntry {
  const { vector, scale, op, low, high, points, gate } = draft;
  const when = whenOf(draft);
  return {
    vector,
    scale: scale ?? NaN,
    op,
    ...(op === "add" && draft.isMatched ? { match_norm: true } : {}),
    ...(op === "clamp" && low !== null ? { low } : {}),
    ...(op === "clamp" && high !== null ? { high } : {}),
    ...(points === null ? {} : { points }),
    ...(when === "both" ? {} : { when }),
    ...(gate === null ? {} : { gate: gateOf(gate) }),
  };
}

function whenOf({ phase, positions, skipsSpecial }: EntryDraft): When {
  const ranges = phase === "last_prompt" ? [] : (rangesOf(positions, phase).ranges ?? []);
  if (ranges.length === 0 && !skipsSpecial) return phase;
  return {
    phase,
    ...(ranges.length > 0 ? { positions: ranges } : {}),
    ...(skipsSpecial ? { skip_special: true } : {}),
  };
}

function gateOf({ probe, threshold, sharpness, isLatched, release }: GateDraft): SteerGate {
  return {
    probe,
    ...(threshold === null ? {} : { threshold }),
    ...(sharpness === null ? {} : { sharpness }),
    ...(isLatched ? { latch: true } : {}),
    ...(release === null || sharpness !== null || isLatched ? {} : { release }),
  };
}

/** The engine's vectors, points and probes, against which entries are checked. */
export interface Catalog {
  vectors: readonly VectorInfo[];
  points: readonly string[];
  probes: readonly ProbeInfo[];
}

/** The faults as sentences; empty if the entry can be sent. The server has the last word. */
export function faultsOf(draft: EntryDraft, catalog: Catalog): string[] {
  const vector = catalog.vectors.find(({ name }) => name === draft.vector);
  if (!vector) return [`The engine no longer has the vector ${draft.vector}.`];
  const points = draft.points ?? vector.points;
  const faults: (string | null)[] = [
    draft.scale === null ? "Set a scale." : null,
    points.length === 0 ? "Choose at least one point." : null,
    ...points.filter((point) => !catalog.points.includes(point)).map((point) => `${point} is not tapped.`),
    draft.op === "clamp" ? clampFault(draft) : null,
    draft.phase === "last_prompt" ? null : rangesOf(draft.positions, draft.phase).fault,
    draft.gate === null ? null : gateFault(draft.gate, points, catalog.probes),
  ];
  return faults.filter((fault) => fault !== null);
}

function clampFault({ low, high }: EntryDraft): string | null {
  if (low === null && high === null) return "A clamp needs a low or a high bound.";
  return low !== null && high !== null && low > high ? "The low bound is above the high bound." : null;
}

function gateFault(gate: GateDraft, points: readonly string[], probes: readonly ProbeInfo[]): string | null {
  const probe = probes.find(({ name }) => name === gate.probe);
  if (!probe) return "Choose the gate's probe.";
  const threshold = gate.threshold ?? probe.threshold;
  if (threshold === null) return `${probe.name} has no threshold of its own: set one.`;
  const behind = points.find((point) => isBehind(probe.point, point));
  if (behind !== undefined) {
    return `${probe.name} reads ${probe.point}, which the model reaches only after ${behind}: choose an earlier probe or a later point.`;
  }
  if (gate.sharpness !== null && gate.sharpness <= 0) return "The sharpness must be above 0.";
  const release = gate.sharpness === null && !gate.isLatched ? gate.release : null;
  return release !== null && release > threshold ? "A gate must close at or below its threshold." : null;
}

/** The points at which the probe's score is already known when the model gets there. */
export function gatable(probe: ProbeInfo | undefined, points: readonly string[]): string[] {
  return points.filter((point) => probe !== undefined && !isBehind(probe.point, point));
}

/** The default probe of a gate: the chosen one if it can serve as one, else the earliest. */
export function gateProbe(
  probes: readonly ProbeInfo[],
  looked: string | null,
  points: readonly string[],
): string {
  const chosen = probes.find(({ name }) => name === looked);
  if (chosen && gatable(chosen, points).length > 0) return chosen.name;
  const [first, ...rest] = probes;
  if (!first) return "";
  return rest.reduce((best, each) => (isBehind(best.point, each.point) ? each : best), first).name;
}

/** The panel's fields for an entry of a run or a link; null if the panel cannot show it. */
export function draftOf(id: number, found: unknown): EntryDraft | null {
  if (typeof found !== "object" || found === null) return null;
  const entry = found as Partial<SteerEntry>;
  if (typeof entry.vector !== "string" || numberOr(entry.scale) === null) return null;
  const op = OPS.find((name) => name === entry.op);
  if (!op) return null;
  return {
    ...freshEntry(id, { name: entry.vector, scale: numberOr(entry.scale) ?? 0 }),
    op,
    isMatched: entry.match_norm === true,
    low: numberOr(entry.low),
    high: numberOr(entry.high),
    points: Array.isArray(entry.points) ? entry.points.filter((point) => typeof point === "string") : null,
    ...whenDraft(entry.when),
    gate: gateDraft(entry.gate),
  };
}

function whenDraft(when: unknown): Pick<EntryDraft, "phase" | "positions" | "skipsSpecial"> {
  const given = (typeof when === "object" && when !== null ? when : { phase: when }) as {
    phase?: unknown;
    positions?: unknown;
    skip_special?: unknown;
  };
  return {
    phase: PHASES.find((phase) => phase === given.phase) ?? "both",
    positions: Array.isArray(given.positions) ? rangesText(given.positions.filter(isRange)) : "",
    skipsSpecial: given.skip_special === true,
  };
}

function gateDraft(found: unknown): GateDraft | null {
  if (typeof found !== "object" || found === null) return null;
  const gate = found as Partial<SteerGate>;
  return {
    probe: typeof gate.probe === "string" ? gate.probe : "",
    threshold: numberOr(gate.threshold),
    sharpness: numberOr(gate.sharpness),
    isLatched: gate.latch === true,
    release: numberOr(gate.release),
  };
}

export const OPS: readonly Op[] = ["add", "ablate", "clamp", "replace"];
export const PHASES: readonly Phase[] = ["both", "prompt", "generation", "last_prompt"];

function isRange(found: unknown): found is PositionRange {
  if (!Array.isArray(found) || found.length !== 2) return false;
  return Number.isInteger(found[0]) && (found[1] === null || Number.isInteger(found[1]));
}

function numberOr(found: unknown): number | null {
  return typeof found === "number" && Number.isFinite(found) ? found : null;
}
