// Takes nothing; gives the left column: probes and history, with room for panels to come.
import { useId } from "react";
import { usePage } from "../../state/page";
import type { Pane } from "../../state/types";
import { useView } from "../hooks";
import { History } from "./History";
import { ProbePicker } from "./ProbePicker";

const TABS: readonly { pane: Pane; title: string }[] = [
  { pane: "probes", title: "Probes" },
  { pane: "history", title: "History" },
];

export function Rail() {
  const page = usePage();
  const id = useId();
  const isHistory = useView((state) => state.pane === "history");
  const isFrozen = useView((state) => state.isFrozen);
  const current: Pane = isHistory ? "history" : "probes";
  return (
    <aside className="rail" aria-label="Probes and history">
      {!isFrozen && (
        <div className="rail-tabs" role="tablist" aria-label="Left column">
          {TABS.map(({ pane, title }) => (
            <button
              key={pane}
              type="button"
              role="tab"
              id={`${id}${pane}`}
              aria-selected={current === pane}
              aria-controls={`${id}panel`}
              tabIndex={current === pane ? 0 : -1}
              onClick={() => page.store.setState({ pane })}
              onKeyDown={(event) => {
                if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
                event.stopPropagation();
                page.store.setState({ pane: current === "probes" ? "history" : "probes" });
                const other = current === "probes" ? "history" : "probes";
                document.getElementById(`${id}${other}`)?.focus();
              }}
            >
              {title}
            </button>
          ))}
        </div>
      )}
      <div
        className="rail-panel"
        id={`${id}panel`}
        role="tabpanel"
        aria-label={isHistory ? "History" : "Probes"}
        tabIndex={0}
      >
        {isHistory && !isFrozen ? <History /> : <ProbePicker />}
      </div>
    </aside>
  );
}
