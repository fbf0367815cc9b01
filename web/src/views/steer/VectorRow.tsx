// One vector of the engine, with the steering entries that use it.
import type { VectorInfo } from "../../api/steering";
import type { EntryDraft } from "../../data/entryDraft";
import { usePage } from "../../state/page";
import { addEntry, removeEntries } from "../../state/draftActions";
import { brief, counted, exact } from "../../text/number";
import { EntryCard } from "./EntryCard";

interface Props {
  vector: VectorInfo;
  entries: readonly EntryDraft[];
}

export function VectorRow({ vector, entries }: Props) {
  const page = usePage();
  const isChosen = entries.length > 0;
  const toggle = () => {
    if (isChosen) removeEntries(page.store, (entry) => entry.vector === vector.name);
    else addEntry(page.store, vector);
  };
  return (
    <li className="vector" data-chosen={isChosen || undefined}>
      <label className="vector-name">
        <input type="checkbox" checked={isChosen} onChange={toggle} />
        <span>{vector.name}</span>
        <span className="faint number">{placesOf(vector)}</span>
      </label>
      {vector.description != null && <p className="vector-text">{vector.description}</p>}
      {entries.map((entry) => (
        <EntryCard key={entry.id} entry={entry} vector={vector} isOnly={entries.length === 1} />
      ))}
      {isChosen && (
        <p className="vector-foot">
          <span className="faint">
            Suggested scale {exact(vector.scale)}, norm {normsOf(vector)}
            {vector.method != null && ` (${vector.method})`}
          </span>
          <button type="button" className="quiet" onClick={() => addEntry(page.store, vector)}>
            Add another entry
          </button>
        </p>
      )}
    </li>
  );
}

function placesOf({ points }: VectorInfo): string {
  return points.length === 1 ? (points[0] ?? "") : counted(points.length, "point");
}

function normsOf({ norms }: VectorInfo): string {
  let [low, high] = [Infinity, -Infinity];
  for (const norm of norms) [low, high] = [Math.min(low, norm), Math.max(high, norm)];
  return norms.length === 1 ? brief(low) : `${brief(low)} to ${brief(high)}`;
}
