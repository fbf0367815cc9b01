// The fields of one steering entry: scale, operation, points, positions and gate.
import type { Op, Phase, VectorInfo } from "../../api/steering";
import {
  faultsOf,
  gatable,
  isOn,
  OPS,
  PHASES,
  reachOf,
  stepOf,
  withOp,
  type EntryDraft,
} from "../../data/entryDraft";
import { usePage } from "../../state/page";
import { catalogOf } from "../../state/request";
import { changeEntry, removeEntries } from "../../state/draftActions";
import { useView } from "../hooks";
import { GateFields } from "./GateFields";
import { NumberField } from "./NumberField";

const OP_WORDS: Record<Op, string> = {
  add: "Add",
  ablate: "Ablate (remove)",
  clamp: "Clamp (limit)",
  replace: "Replace (patch)",
};

const PHASE_WORDS: Record<Phase, string> = {
  both: "Prompt and answer",
  prompt: "Prompt",
  generation: "Answer",
  last_prompt: "Last prompt token",
};

interface Props {
  entry: EntryDraft;
  vector: VectorInfo;
  isOnly: boolean;
}

export function EntryCard({ entry, vector, isOnly }: Props) {
  const page = usePage();
  const change = (made: Partial<EntryDraft>) => changeEntry(page.store, entry.id, made);
  const { id, ...acted } = entry;
  const act = (op: Op, isMatched: boolean) => change(withOp(entry, op, isMatched, vector.scale));
  return (
    <fieldset className="entry-card" data-off={!isOn(acted) || undefined}>
      <legend className="hidden">Steering with {vector.name}</legend>
      <Scale entry={entry} vector={vector} onChange={(scale) => change({ scale })} />
      <div className="pair-row">
        <label className="field">
          Operation
          <select
            value={entry.op}
            onChange={(event) =>
              act(event.target.value as Op, entry.isMatched && event.target.value === "add")
            }
          >
            {OPS.map((op) => (
              <option key={op} value={op}>
                {OP_WORDS[op]}
              </option>
            ))}
          </select>
        </label>
        <label className="field">
          When
          <select value={entry.phase} onChange={(event) => change({ phase: event.target.value as Phase })}>
            {PHASES.map((phase) => (
              <option key={phase} value={phase}>
                {PHASE_WORDS[phase]}
              </option>
            ))}
          </select>
        </label>
        {entry.op === "clamp" && (
          <>
            <NumberField
              title="Lowest"
              value={entry.low}
              onChange={(low) => change({ low })}
              placeholder="none"
            />
            <NumberField
              title="Highest"
              value={entry.high}
              onChange={(high) => change({ high })}
              placeholder="none"
            />
          </>
        )}
      </div>
      {entry.op === "add" && (
        <label className="check" title="The scale is relative to the norm of the row it is added to">
          <input
            type="checkbox"
            checked={entry.isMatched}
            onChange={(event) => act("add", event.target.checked)}
          />
          Match the norm of each row
        </label>
      )}
      <GateFields entry={entry} own={vector.points} onChange={(gate) => change({ gate })} />
      <Where entry={entry} vector={vector} onChange={change} />
      <EntryFaults entry={entry} vector={vector} onChange={change} />
      {!isOnly && (
        <button
          type="button"
          className="quiet"
          onClick={() => removeEntries(page.store, (each) => each.id === id)}
        >
          Remove this entry
        </button>
      )}
    </fieldset>
  );
}

interface ScaleProps {
  entry: EntryDraft;
  vector: VectorInfo;
  onChange: (scale: number | null) => void;
}

/** A slider around the suggested scale, to both sides of 0, and a field that accepts any number. */
function Scale({ entry, vector, onChange }: ScaleProps) {
  const reach = reachOf(entry, vector.scale);
  const step = stepOf(reach);
  return (
    <div className="scale-row">
      <input
        type="range"
        aria-label={`Scale of ${vector.name}`}
        min={-reach}
        max={reach}
        step={step}
        value={entry.scale ?? 0}
        onChange={(event) => onChange(near(event.target.valueAsNumber, step))}
      />
      <NumberField
        title={`Scale of ${vector.name}, as a number`}
        isTitleHidden
        value={entry.scale}
        onChange={onChange}
      />
      {!isOn(entry) && <span className="faint">off, not sent</span>}
    </div>
  );
}

/** Rounds to a multiple of the step, which a slider misses if its minimum is not one. */
function near(value: number, step: number): number {
  return Number((Math.round(value / step) * step).toPrecision(12));
}

interface WhereProps {
  entry: EntryDraft;
  vector: VectorInfo;
  onChange: (made: Partial<EntryDraft>) => void;
}

function Where({ entry, vector, onChange }: WhereProps) {
  const chosen = entry.points ?? vector.points;
  const toggle = (point: string) => {
    const points = vector.points.filter((each) => (each === point) !== chosen.includes(each));
    onChange({ points: points.length === vector.points.length ? null : points });
  };
  return (
    <details className="more">
      <summary>{placesWords(entry, vector)}</summary>
      {vector.points.length > 1 && (
        <div className="points" role="group" aria-label={`Points of ${vector.name}`}>
          {vector.points.map((point) => (
            <label key={point} className="check">
              <input type="checkbox" checked={chosen.includes(point)} onChange={() => toggle(point)} />
              <code>{point}</code>
            </label>
          ))}
        </div>
      )}
      {entry.phase !== "last_prompt" && (
        <label className="field">
          Positions,{" "}
          {entry.phase === "generation"
            ? "counted from the answer’s first token"
            : "counted from the prompt’s first token; negative ones from its end"}
          <input
            value={entry.positions}
            placeholder={entry.phase === "generation" ? "all; or 0:8" : "all; or 0:4, -3:"}
            onChange={(event) => onChange({ positions: event.target.value })}
          />
        </label>
      )}
      <label className="check">
        <input
          type="checkbox"
          checked={entry.skipsSpecial}
          onChange={(event) => onChange({ skipsSpecial: event.target.checked })}
        />
        Skip special tokens
      </label>
    </details>
  );
}

function placesWords({ points, positions, skipsSpecial }: EntryDraft, vector: VectorInfo): string {
  const where =
    points === null
      ? vector.points.length === 1
        ? `At ${vector.points[0] ?? ""}`
        : `At all ${vector.points.length} points`
      : `At ${points.length} of ${vector.points.length} points`;
  const which = positions.trim() === "" ? "every position" : `positions ${positions}`;
  return `${where}, ${which}${skipsSpecial ? ", no special tokens" : ""}`;
}

function EntryFaults({ entry, vector, onChange }: WhereProps) {
  const steering = useView((state) => state.steering);
  const probes = useView((state) => state.probes);
  const faults = isOn(entry) ? faultsOf(entry, catalogOf({ steering, probes })) : [];
  if (faults.length === 0) return null;
  const points = entry.points ?? vector.points;
  const later = gatable(
    probes?.find(({ name }) => name === entry.gate?.probe),
    points,
  );
  return (
    <ul className="failure">
      {faults.map((fault) => (
        <li key={fault}>{fault}</li>
      ))}
      {later.length > 0 && later.length < points.length && (
        <li>
          <button type="button" className="quiet" onClick={() => onChange({ points: later })}>
            Steer at {later.join(", ")} only
          </button>
        </li>
      )}
    </ul>
  );
}
