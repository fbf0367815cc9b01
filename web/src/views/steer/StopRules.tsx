// The fields of the stop rules, which stop an answer or flag it while a probe stays high.
import { MAX_RULES, ruleFault, type RuleDraft } from "../../data/rules";
import { usePage } from "../../state/page";
import { addRule, changeRule, removeRule } from "../../state/draftActions";
import { brief } from "../../text/number";
import { useView } from "../hooks";
import { ordered } from "../sidebar/probeGroups";
import { NumberField } from "./NumberField";

export function StopRules() {
  const page = usePage();
  const rules = useView((state) => state.draft.rules);
  const probe = useView((state) => state.probe);
  return (
    <section aria-labelledby="rules-title" className="rules">
      <header className="panel-head">
        <h2 id="rules-title">Stop rules</h2>
        <button
          type="button"
          className="quiet"
          disabled={probe === null || rules.length >= MAX_RULES}
          onClick={() => addRule(page.store, probe ?? "")}
        >
          Add a rule
        </button>
      </header>
      {rules.length === 0 && (
        <p className="note">
          A rule stops the answer, or flags it, when a probe stays at or over a threshold.
        </p>
      )}
      {rules.map((rule) => (
        <Rule key={rule.id} rule={rule} />
      ))}
    </section>
  );
}

function Rule({ rule }: { rule: RuleDraft }) {
  const page = usePage();
  const probes = ordered(useView((state) => state.probes) ?? []);
  const own = probes.find(({ name }) => name === rule.probe)?.threshold ?? null;
  const fault = ruleFault(rule, probes);
  const change = (made: Partial<RuleDraft>) => changeRule(page.store, rule.id, made);
  return (
    <fieldset className="entry-card">
      <legend className="hidden">Rule on {rule.probe}</legend>
      <div className="pair-row">
        <label className="field">
          Probe
          <select value={rule.probe} onChange={(event) => change({ probe: event.target.value })}>
            {!probes.some(({ name }) => name === rule.probe) && <option value={rule.probe}>choose</option>}
            {probes.map(({ name }) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
        <NumberField
          title="At or over"
          value={rule.threshold}
          onChange={(threshold) => change({ threshold })}
          placeholder={own === null ? "required" : `default ${brief(own)}`}
        />
        <NumberField
          title="Tokens in a row"
          value={rule.tokens}
          onChange={(tokens) => change({ tokens })}
          min={1}
          step={1}
        />
        <label className="field">
          Then
          <select
            value={rule.action}
            onChange={(event) => change({ action: event.target.value === "alert" ? "alert" : "stop" })}
          >
            <option value="stop">stop the answer</option>
            <option value="alert">flag it and continue</option>
          </select>
        </label>
      </div>
      {fault !== null && <p className="failure">{fault}</p>}
      <button type="button" className="quiet" onClick={() => removeRule(page.store, rule.id)}>
        Remove
      </button>
    </fieldset>
  );
}
