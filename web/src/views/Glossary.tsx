// Describes the probes and their reference scores before the first question.
import type { ProbeInfo } from "../api/types";
import { usePage } from "../state/page";
import { useView } from "./hooks";
import { ordered } from "./sidebar/probeGroups";
import { Bars } from "./tip/ReferenceHistogram";

const MAX_SHOWN = 24;

export function Glossary() {
  const probes = useView((state) => state.probes);
  if (!probes || probes.length === 0) return null;
  return (
    <section className="panel glossary" aria-labelledby="glossary-title">
      <header className="panel-head">
        <h2 id="glossary-title">What the probes look for</h2>
      </header>
      <ul>
        {ordered(probes)
          .slice(0, MAX_SHOWN)
          .map((probe) => (
            <Entry key={probe.name} probe={probe} />
          ))}
      </ul>
      <p className="note">
        The bars are scores on reference texts, from low to high; the line is the threshold. Tokens at or over
        it are underlined.
      </p>
    </section>
  );
}

function Entry({ probe }: { probe: ProbeInfo }) {
  const page = usePage();
  return (
    <li>
      <button type="button" onClick={() => page.store.setState({ probe: probe.name })}>
        <span className="glossary-name">{probe.name}</span>
        <span className="glossary-text">{probe.description ?? `Read at ${probe.point}.`}</span>
      </button>
      {probe.histogram && <Bars probe={probe} histogram={probe.histogram} value={NaN} />}
    </li>
  );
}
