// The left column with the tabs for probes, steering and history.
import { useId } from "react";
import { usePage } from "../../state/page";
import type { Pane } from "../../state/types";
import { useView } from "../hooks";
import { History } from "./History";
import { SteerPanel } from "../steer/SteerPanel";
import { ProbePicker } from "./ProbePicker";

const PROBES: { pane: Pane; title: string } = { pane: "probes", title: "Probes" };
const TABS: readonly { pane: Pane; title: string }[] = [
  PROBES,
  { pane: "steer", title: "Steering" },
  { pane: "history", title: "History" },
];

export function Sidebar() {
  const page = usePage();
  const id = useId();
  const pane = useView((state) => state.pane);
  const isFrozen = useView((state) => state.isFrozen);
  const current = TABS.find((tab) => tab.pane === pane && !isFrozen) ?? PROBES;
  const turn = (by: number) => {
    const at = TABS.findIndex((tab) => tab === current);
    const next = TABS[(at + by + TABS.length) % TABS.length] ?? PROBES;
    page.store.setState({ pane: next.pane });
    document.getElementById(`${id}${next.pane}`)?.focus();
  };
  return (
    <aside className="sidebar" aria-label="Probes, steering and history">
      {!isFrozen && (
        <div className="sidebar-tabs" role="tablist" aria-label="Left column">
          {TABS.map(({ pane: name, title }) => (
            <button
              key={name}
              type="button"
              role="tab"
              id={`${id}${name}`}
              aria-selected={current.pane === name}
              aria-controls={`${id}panel`}
              tabIndex={current.pane === name ? 0 : -1}
              onClick={() => page.store.setState({ pane: name })}
              onKeyDown={(event) => {
                if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
                event.stopPropagation();
                turn(event.key === "ArrowRight" ? 1 : -1);
              }}
            >
              {title}
            </button>
          ))}
        </div>
      )}
      <div
        className="sidebar-panel"
        id={`${id}panel`}
        role="tabpanel"
        aria-label={current.title}
        tabIndex={0}
      >
        {current.pane === "history" ? (
          <History />
        ) : current.pane === "steer" ? (
          <SteerPanel />
        ) : (
          <ProbePicker />
        )}
      </div>
    </aside>
  );
}
