// The list of all probes by layer, to choose the one that colours the tokens.
import { useMemo, useRef, useState } from "react";
import { MAX_LINES } from "../../colour/lines";
import { useView } from "../hooks";
import { useLineStyles } from "../charts/Charts";
import { grouped, matching } from "./probeGroups";
import { useMeters } from "./meters";
import { ProbeRow } from "./ProbeRow";

export function ProbePicker() {
  const probes = useView((state) => state.probes);
  const lines = useView((state) => state.lines);
  const styles = useLineStyles(lines);
  const [search, setSearch] = useState("");
  const list = useRef<HTMLDivElement>(null);
  const groups = useMemo(() => grouped(matching(probes ?? [], search)), [probes, search]);
  useMeters(list, probes ?? []);
  if (probes === null) return <p className="empty">Waiting for the engine’s list of probes.</p>;
  if (probes.length === 0) return <NoProbes />;
  return (
    <div className="picker" ref={list}>
      <label className="search">
        <span className="hidden">Search probes</span>
        <input
          id="probe-search"
          type="search"
          placeholder={`Search ${probes.length} probes`}
          value={search}
          onChange={(event) => setSearch(event.target.value)}
        />
      </label>
      <p className="picker-head" aria-hidden="true">
        <span>colour</span>
        <span>{probes.some(({ auroc }) => auroc != null) ? "AUROC" : ""}</span>
        <span>chart</span>
      </p>
      {groups.length === 0 && <p className="empty">No probe matches “{search}”.</p>}
      {groups.map(({ layer, probes: members }) => (
        <fieldset key={layer} className="layer">
          <legend>{layer < 0 ? "Other points" : `Layer ${layer}`}</legend>
          {members.map((probe) => (
            <ProbeRow
              key={probe.name}
              probe={probe}
              style={styles.get(probe.name)}
              isFull={lines.length >= MAX_LINES}
            />
          ))}
        </fieldset>
      ))}
    </div>
  );
}

function NoProbes() {
  return (
    <div className="empty">
      <p>This engine has no probes yet. Add one while it runs:</p>
      <pre>clairai probes add french.safetensors --url {location.origin}</pre>
    </div>
  );
}
