// The system prompt and the sampling settings; an empty field is not sent.
import { useId } from "react";
import { usePage } from "../../state/page";
import { NO_SAMPLING, type Sampling } from "../../state/types";
import { useView } from "../hooks";

type NumberSetting = Exclude<keyof Sampling, "stop">;

interface Field {
  key: NumberSetting;
  title: string;
  min: number;
  max: number;
  step: number;
}

const FIELDS: readonly Field[] = [
  { key: "max_tokens", title: "Max tokens", min: 1, max: 1_000_000, step: 1 },
  { key: "temperature", title: "Temperature", min: 0, max: 2, step: 0.1 },
  { key: "top_p", title: "Top p", min: 0.01, max: 1, step: 0.01 },
  { key: "top_k", title: "Top k", min: -1, max: 1_000_000, step: 1 },
  { key: "min_p", title: "Min p", min: 0, max: 1, step: 0.01 },
  { key: "seed", title: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 },
  { key: "presence_penalty", title: "Presence penalty", min: -2, max: 2, step: 0.1 },
  { key: "frequency_penalty", title: "Frequency penalty", min: -2, max: 2, step: 0.1 },
  { key: "repetition_penalty", title: "Repetition penalty", min: 0.01, max: 2, step: 0.05 },
];

export function Settings() {
  const page = usePage();
  const draft = useView((state) => state.draft);
  const { models, model } = { models: useView((s) => s.models), model: useView((s) => s.model) };
  const id = useId();
  const change = (sampling: Partial<Sampling>) =>
    page.store.setState({ draft: { ...draft, sampling: { ...draft.sampling, ...sampling } } });
  return (
    <fieldset className="settings">
      <legend className="hidden">Settings for the next question</legend>
      <label className="field wide" htmlFor={`${id}system`}>
        System prompt
      </label>
      <textarea
        id={`${id}system`}
        className="wide"
        rows={2}
        placeholder="If empty, the model's chat template decides"
        value={draft.system}
        onChange={(event) => page.store.setState({ draft: { ...draft, system: event.target.value } })}
      />
      {models.length > 1 && (
        <label className="field">
          Model
          <select
            value={model ?? ""}
            onChange={(event) => page.store.setState({ model: event.target.value })}
          >
            {models.map((name) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
      )}
      {FIELDS.map((field) => (
        <NumberField key={field.key} field={field} value={draft.sampling[field.key]} onChange={change} />
      ))}
      <label className="field wide">
        Stop sequences (one per line)
        <textarea
          rows={1}
          value={draft.sampling.stop.join("\n")}
          onChange={(event) =>
            change({ stop: event.target.value === "" ? [] : event.target.value.split("\n") })
          }
        />
      </label>
      <button type="button" className="quiet" onClick={() => change(NO_SAMPLING)}>
        Reset to defaults
      </button>
    </fieldset>
  );
}

interface NumberFieldProps {
  field: Field;
  value: number | null;
  onChange: (change: Partial<Sampling>) => void;
}

function NumberField({ field, value, onChange }: NumberFieldProps) {
  const { key, title, ...bounds } = field;
  return (
    <label className="field">
      {title}
      <input
        type="number"
        inputMode="decimal"
        placeholder="default"
        {...bounds}
        value={value ?? ""}
        onChange={(event) => {
          const number = event.target.valueAsNumber;
          onChange({ [key]: Number.isNaN(number) ? null : number });
        }}
      />
    </label>
  );
}
