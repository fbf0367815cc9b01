// The fields of an entry's gate: the probe that switches it on and off, token by token.
import { gateProbe, type EntryDraft, type GateDraft } from "../../data/entryDraft";
import { brief } from "../../text/number";
import { useView } from "../hooks";
import { ordered } from "../sidebar/probeGroups";
import { NumberField } from "./NumberField";

interface Props {
  entry: EntryDraft;
  /** The points of the entry's vector. */
  own: readonly string[];
  onChange: (gate: GateDraft | null) => void;
}

const SHARPNESS = 10;

export function GateFields({ entry: { gate, vector, points }, own, onChange }: Props) {
  const probes = useView((state) => state.probes) ?? [];
  const chosen = useView((state) => state.probe);
  const open = () =>
    onChange({
      probe: gateProbe(probes, chosen, points ?? own),
      threshold: null,
      sharpness: null,
      isLatched: false,
      release: null,
    });
  return (
    <>
      <label className="check">
        <input
          type="checkbox"
          checked={gate !== null}
          disabled={probes.length === 0}
          onChange={(event) => (event.target.checked ? open() : onChange(null))}
        />
        Gate by a probe
      </label>
      {gate !== null && <Gate gate={gate} vector={vector} onChange={onChange} />}
    </>
  );
}

interface GateProps {
  gate: GateDraft;
  vector: string;
  onChange: (gate: GateDraft) => void;
}

function Gate({ gate, vector, onChange }: GateProps) {
  const probes = ordered(useView((state) => state.probes) ?? []);
  const own = probes.find(({ name }) => name === gate.probe)?.threshold ?? null;
  const change = (made: Partial<GateDraft>) => onChange({ ...gate, ...made });
  const isSoft = gate.sharpness !== null;
  return (
    <div className="gate" role="group" aria-label={`Gate of ${vector}`}>
      <div className="pair-row">
        <label className="field">
          Probe
          <select value={gate.probe} onChange={(event) => change({ probe: event.target.value })}>
            {!probes.some(({ name }) => name === gate.probe) && <option value={gate.probe}>choose</option>}
            {probes.map(({ name }) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
        <NumberField
          title="Threshold"
          value={gate.threshold}
          onChange={(threshold) => change({ threshold })}
          placeholder={own === null ? "required" : `default ${brief(own)}`}
        />
        <label className="field">
          Opens
          <select
            value={isSoft ? "soft" : "hard"}
            onChange={(event) => change({ sharpness: event.target.value === "soft" ? SHARPNESS : null })}
          >
            <option value="hard">all or nothing</option>
            <option value="soft">gradually</option>
          </select>
        </label>
        {isSoft && (
          <NumberField
            title="Sharpness"
            value={gate.sharpness}
            onChange={(sharpness) => change({ sharpness: sharpness ?? 0 })}
          />
        )}
        {!isSoft && !gate.isLatched && (
          <NumberField
            title="Closes below"
            value={gate.release}
            onChange={(release) => change({ release })}
            placeholder="the threshold"
          />
        )}
      </div>
      <label className="check">
        <input
          type="checkbox"
          checked={gate.isLatched}
          onChange={(event) => change({ isLatched: event.target.checked })}
        />
        Stay open once opened
      </label>
    </div>
  );
}
