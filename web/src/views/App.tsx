// The page's layout: sidebar, conversation or comparison, and charts.
import { useEffect } from "react";
import { shownFocus } from "../state/focus";
import { usePage } from "../state/page";
import type { Pane } from "../state/types";
import { score } from "../text/number";
import { spoken } from "../text/token";
import { Bar } from "./bar/Bar";
import { Banner } from "./bar/Banner";
import { Conversation } from "./chat/Conversation";
import { Compare } from "./Compare";
import { Crossings } from "./Crossings";
import { Glossary } from "./Glossary";
import { useShownFocus, useTheme, useView } from "./hooks";
import { KeyDialog } from "./KeyDialog";
import { useShortcuts } from "./shortcuts";
import { Sidebar } from "./sidebar/Sidebar";
import { Charts } from "./charts/Charts";
import { Tip } from "./tip/Tip";
import { useTitle } from "./title";

export function App() {
  const theme = useTheme();
  const pane = useView((state) => state.pane);
  const isComparing = useView((state) => state.versus !== null && state.head !== null);
  const hasRun = useView((state) => state.head !== null);
  useShortcuts();
  useTitle();
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
  }, [theme]);
  return (
    <div className="page" data-pane={pane} data-comparing={isComparing || undefined}>
      <Bar />
      <Banner />
      <main className="columns">
        <Sidebar />
        {isComparing ? <Compare /> : <Conversation />}
        {!isComparing && (
          <div className="charts">
            {hasRun ? <Charts /> : <Glossary />}
            {hasRun && <Crossings />}
          </div>
        )}
      </main>
      <Tabs />
      <Tip />
      <KeyDialog />
      <Announcer />
    </div>
  );
}

const TABS: readonly { pane: Pane; title: string }[] = [
  { pane: "chat", title: "Chat" },
  { pane: "charts", title: "Charts" },
  { pane: "crossings", title: "Crossings" },
  { pane: "probes", title: "Probes" },
  { pane: "steer", title: "Steer" },
  { pane: "history", title: "History" },
];

/** On a narrow screen, one column is shown at a time. */
function Tabs() {
  const page = usePage();
  const pane = useView((state) => state.pane);
  const numUnseen = useView((state) => state.numUnseen);
  return (
    <nav className="tabs" aria-label="Parts of the page">
      {TABS.map((tab) => (
        <button
          key={tab.pane}
          type="button"
          aria-current={pane === tab.pane ? "page" : undefined}
          onClick={() => page.store.setState({ pane: tab.pane })}
        >
          {tab.title}
          {tab.pane === "crossings" && numUnseen > 0 && (
            <span className="count">{Math.min(numUnseen, 99)}</span>
          )}
        </button>
      ))}
    </nav>
  );
}

/** Announces the pinned token and new crossings to screen readers. */
function Announcer() {
  const page = usePage();
  const focus = useShownFocus();
  const probe = useView((state) => state.probe);
  const newest = useView((state) => state.crossings.at(-1));
  const isPinned = focus !== null && shownFocus(page.focus.getState()) === page.focus.getState().pin;
  const transcript = isPinned ? page.transcripts.get(focus.run) : null;
  const row = transcript && focus ? transcript.rowOf(focus.token) : 0;
  const said =
    transcript && focus && probe !== null
      ? `${focus.token.part} token ${focus.token.index + 1}: ${transcript.media.get(row) ?? spoken(transcript.tokens[row] ?? "")}. ${probe} ${score(transcript.scores.value(probe, row))}`
      : "";
  return (
    <>
      <p className="hidden" aria-live="polite">
        {said}
      </p>
      <p className="hidden" aria-live="polite">
        {newest
          ? `${newest.probe} crossed its threshold at ${newest.first.part} token ${newest.first.index + 1}`
          : ""}
      </p>
    </>
  );
}
