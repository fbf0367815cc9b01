// Steps through the other answers to a question, or compares one with the answer shown.
import { usePage } from "../../state/page";
import { leafOf, siblings } from "../../state/store";
import type { Run } from "../../state/types";
import { useView } from "../hooks";

export function Variants({ run }: { run: Run }) {
  const page = usePage();
  const runs = useView((state) => state.runs);
  const all = siblings(runs, run);
  const at = all.findIndex(({ id }) => id === run.id);
  if (all.length < 2) return null;
  const go = (step: number) => {
    const other = all[at + step];
    if (other) page.store.setState({ head: leafOf(runs, other.id), span: null });
  };
  const compare = () => {
    const other = all[at - 1] ?? all[at + 1];
    if (other) page.store.setState({ head: run.id, versus: other.id, span: null });
  };
  return (
    <span className="variants">
      <button
        type="button"
        className="quiet"
        onClick={() => go(-1)}
        disabled={at === 0}
        aria-label="Previous variant"
      >
        ‹
      </button>
      <span className="number">
        {at + 1} of {all.length}
      </span>
      <button
        type="button"
        className="quiet"
        onClick={() => go(1)}
        disabled={at === all.length - 1}
        aria-label="Next variant"
      >
        ›
      </button>
      <button type="button" className="quiet" onClick={compare}>
        Compare
      </button>
    </span>
  );
}
