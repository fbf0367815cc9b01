// The runs kept in this browser, newest first: open, compare or delete them.
import { useMemo } from "react";
import { ruleDraftOf } from "../../data/rules";
import { draftOf } from "../../data/entryDraft";
import { usePage } from "../../state/page";
import { pathTo } from "../../state/store";
import type { Draft, Run } from "../../state/types";
import { RUNNING } from "../../state/types";
import { isNarrow, useView } from "../hooks";

export function History() {
  const page = usePage();
  const runs = useView((state) => state.runs);
  const newest = useMemo(() => Object.values(runs).sort((a, b) => b.createdAt - a.createdAt), [runs]);
  if (newest.length === 0) return <p className="empty">Your runs are kept here, in this browser only.</p>;
  const clear = () => {
    const gone = newest.filter(({ status }) => !RUNNING.has(status)).map(({ id }) => id);
    void page.history.remove(gone);
    page.crossingLog.forget(gone);
    page.focus.setState({ pin: null, hover: null, anchor: null });
    page.store.setState((state) => ({
      runs: Object.fromEntries(Object.entries(state.runs).filter(([id]) => !gone.includes(id))),
      head: state.head !== null && gone.includes(state.head) ? null : state.head,
      versus: null,
    }));
  };
  return (
    <div className="history">
      <ul>
        {newest.map((run) => (
          <Entry key={run.id} run={run} />
        ))}
      </ul>
      <button type="button" className="quiet" onClick={clear}>
        Delete all runs
      </button>
    </div>
  );
}

function Entry({ run }: { run: Run }) {
  const page = usePage();
  const head = useView((state) => state.head);
  const versus = useView((state) => state.versus);
  const turn = useView((state) => pathTo(state.runs, run.id).length);
  const isHead = head === run.id;
  // The next question continues this conversation with its system prompt, sampling and steering.
  const open = () =>
    page.store.setState(({ draft, pane }) => ({
      head: run.id,
      versus: null,
      span: null,
      pane: isNarrow() ? "chat" : pane,
      draft: { ...draft, ...settingsOf(run) },
    }));
  const compare = () =>
    page.store.setState({ versus: run.id, span: null, ...(isNarrow() ? { pane: "chat" } : {}) });
  return (
    <li data-current={isHead || undefined} data-versus={versus === run.id || undefined}>
      <button type="button" className="entry" onClick={open} aria-current={isHead || undefined}>
        <span className="entry-text">{run.user}</span>
        <span className="faint">
          <time dateTime={new Date(run.createdAt).toISOString()}>{when(run.createdAt)}</time>
          {turn > 1 && `, turn ${turn}`}
          {run.status !== "done" && `, ${run.status}`}
        </span>
      </button>
      {head !== null && !isHead && (
        <button type="button" className="quiet" onClick={compare} aria-label={`Compare with: ${run.user}`}>
          Compare
        </button>
      )}
    </li>
  );
}

function settingsOf(run: Run): Partial<Draft> {
  return {
    system: run.system,
    sampling: run.sampling,
    entries: run.steer.flatMap((entry, i) => draftOf(i + 1, entry) ?? []),
    rules: run.stop.flatMap((rule, i) => ruleDraftOf(i + 1, rule) ?? []),
  };
}

function when(time: number): string {
  const date = new Date(time);
  const isToday = date.toDateString() === new Date().toDateString();
  const clock = date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  return isToday ? clock : `${date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${clock}`;
}
