// The steering panel: vectors, stop rules and the request they make.
import { useMemo, useState } from "react";
import type { VectorInfo } from "../../api/steering";
import { usePage } from "../../state/page";
import { draftFaults } from "../../state/request";
import { removeEntries, setPaired } from "../../state/draftActions";
import { counted } from "../../text/number";
import { sentence } from "../../text/sentence";
import { useView } from "../hooks";
import { Preview } from "./Preview";
import { StopRules } from "./StopRules";
import { VectorRow } from "./VectorRow";

const MANY = 8;

export function SteerPanel() {
  const steering = useView((state) => state.steering);
  if (steering.kind === "unknown") {
    return <p className="empty">Waiting for the engine’s list of vectors.</p>;
  }
  return (
    <div className="steer">
      {steering.kind === "off" ? <Off reason={steering.reason} /> : <Vectors vectors={steering.vectors} />}
      <StopRules />
      <Faults />
      <Preview />
    </div>
  );
}

/** Says why the engine cannot steer, and how to start one that can. */
function Off({ reason }: { reason: string | null }) {
  const page = usePage();
  const numLeft = useView((state) => state.draft.entries.length);
  return (
    <section className="empty">
      <p>{reason === null ? "This engine cannot steer. Start it with vectors:" : sentence(reason)}</p>
      <pre>clairai serve MODEL --vectors vectors/</pre>
      {numLeft > 0 && (
        <button type="button" onClick={() => removeEntries(page.store, () => true)}>
          Remove {counted(numLeft, "vector")} from the question
        </button>
      )}
    </section>
  );
}

function Vectors({ vectors }: { vectors: readonly VectorInfo[] }) {
  const [search, setSearch] = useState("");
  const entries = useView((state) => state.draft.entries);
  const shown = useMemo(() => matching(vectors, search), [vectors, search]);
  const gone = entries.filter(({ vector }) => !vectors.some(({ name }) => name === vector));
  return (
    <section aria-labelledby="vectors-title">
      <header className="panel-head">
        <h2 id="vectors-title">Vectors</h2>
        {entries.length > 0 && <Paired />}
      </header>
      {vectors.length === 0 && <NoVectors />}
      {vectors.length > MANY && (
        <label className="search">
          <span className="hidden">Search vectors</span>
          <input
            type="search"
            placeholder={`Search ${vectors.length} vectors`}
            value={search}
            onChange={(event) => setSearch(event.target.value)}
          />
        </label>
      )}
      <ul className="vectors" aria-label="Vectors">
        {shown.map((vector) => (
          <VectorRow
            key={vector.name}
            vector={vector}
            entries={entries.filter(({ vector: name }) => name === vector.name)}
          />
        ))}
        {gone.map(({ id, vector }) => (
          <Gone key={id} id={id} name={vector} />
        ))}
      </ul>
    </section>
  );
}

function matching(vectors: readonly VectorInfo[], search: string): VectorInfo[] {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  return vectors.filter(({ name, description }) => {
    const text = `${name} ${description ?? ""}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

function NoVectors() {
  return (
    <div className="empty">
      <p>This engine can steer but has no vectors yet. Add one while it runs:</p>
      <pre>clairai vectors add joy.safetensors --url {location.origin}</pre>
    </div>
  );
}

function Gone({ id, name }: { id: number; name: string }) {
  const page = usePage();
  return (
    <li className="failure">
      The engine no longer has the vector {name}.{" "}
      <button type="button" className="quiet" onClick={() => removeEntries(page.store, (e) => e.id === id)}>
        Remove it
      </button>
    </li>
  );
}

function Paired() {
  const page = usePage();
  const isPaired = useView((state) => state.draft.isPaired);
  return (
    <label className="check" title="Two runs at once, with the same seed; the differences are marked">
      <input
        type="checkbox"
        checked={isPaired}
        onChange={(event) => setPaired(page.store, event.target.checked)}
      />
      Compare with a plain run
    </label>
  );
}

function Faults() {
  const draft = useView((state) => state.draft);
  const steering = useView((state) => state.steering);
  const probes = useView((state) => state.probes);
  const faults = useMemo(() => draftFaults({ draft, steering, probes }), [draft, steering, probes]);
  if (faults.length === 0) return null;
  return (
    <p className="failure" role="status">
      This question cannot be sent: {faults[0]}
    </p>
  );
}
