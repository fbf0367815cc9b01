// Shows two runs side by side with the same token marked in both, and their difference.
import { useCallback, useEffect, useMemo, useRef, useState, type RefObject } from "react";
import type { LineStyle } from "../colour/lines";
import { lineStyle } from "../colour/lines";
import { DiffCache } from "../data/answerDiff";
import type { Transcript } from "../data/transcript";
import { usePage } from "../state/page";
import { RUNNING, type Run } from "../state/types";
import { score, signed } from "../text/number";
import { probeIn, useRun, useTranscriptVersion, useTheme, useView } from "./hooks";
import { Composer } from "./chat/Composer";
import { Legend } from "./chat/Legend";
import { Cells } from "./charts/Cells";
import { Stroke } from "./charts/LineLegend";
import { Lines } from "./charts/Lines";
import { GUTTER } from "./charts/plot";
import { usePointerActions } from "./charts/pointerActions";
import { clipped, difference, extentOf, traceOf, type Trace } from "./charts/traces";
import { Side } from "./Side";
import type { SideDiff } from "./tokens/TokenList";

export function Compare() {
  const a = useRun(useView((state) => state.head));
  const b = useRun(useView((state) => state.versus));
  const hasMarks = useView((state) => state.hasMarks);
  const hasMono = useView((state) => state.hasMono);
  const sides = useRef<HTMLDivElement>(null);
  const hasComposer = useView((state) => !state.isFrozen && state.draft.entries.length > 0);
  useSyncedSides(sides, a?.id ?? null, b?.id ?? null);
  const [hasPrompts, setPrompts] = useState(false);
  const [ofA, ofB] = useDiff(a?.id ?? "", b?.id ?? "");
  if (!a || !b) return null;
  return (
    <section className="compare" aria-label="Two runs compared">
      <Legend />
      <div
        className="compare-runs"
        ref={sides}
        data-marks={hasMarks || undefined}
        data-mono={hasMono || undefined}
      >
        <Side run={a} name="A" diff={ofA} hasPrompt={hasPrompts} onPrompt={setPrompts} />
        <Side run={b} name="B" diff={ofB} hasPrompt={hasPrompts} onPrompt={setPrompts} />
      </div>
      <Both a={a} b={b} />
      {hasComposer && <Composer />}
    </section>
  );
}

/** The tokens that only one of the runs has, computed once for both. */
function useDiff(a: string, b: string): [SideDiff, SideDiff] {
  const page = usePage();
  return useMemo(() => {
    const cache = new DiffCache();
    const isGrowing = (id: string) => RUNNING.has(page.store.getState().runs[id]?.status ?? "done");
    const marks = () =>
      cache.of(page.transcripts.get(a), page.transcripts.get(b), [isGrowing(a), isGrowing(b)]);
    return [
      { other: b, read: () => marks().a },
      { other: a, read: () => marks().b },
    ];
  }, [page, a, b]);
}

/** Scrolls both sides together, and scrolls a pinned token into view in both. */
function useSyncedSides(sides: RefObject<HTMLElement | null>, a: string | null, b: string | null): void {
  const page = usePage();
  useEffect(() => {
    const box = sides.current;
    if (!box || a === null || b === null) return;
    const follow = (event: Event) => {
      const moved = event.target as HTMLElement;
      for (const side of box.children) {
        if (side !== moved && side.scrollTop !== moved.scrollTop) side.scrollTop = moved.scrollTop;
      }
    };
    // Scroll events do not bubble, but they can be captured.
    box.addEventListener("scroll", follow, { capture: true });
    const stop = page.focus.subscribe(({ pin }, before) => {
      if (pin === null || pin === before.pin) return;
      for (const run of [a, b]) page.tokenViews.reveal({ run, token: pin.token });
    });
    return () => {
      box.removeEventListener("scroll", follow, { capture: true });
      stop();
    };
  }, [page, sides, a, b]);
}

/** The chosen probe in both runs, on one axis that starts at the answers. */
function useTraces(a: Run, b: Run): () => Trace[] {
  const page = usePage();
  const probes = useView((state) => state.probes);
  const name = useView((state) => state.probe);
  return useCallback(() => {
    return [a, b].flatMap((run, i) => {
      const probe = probeIn(run, probes, name);
      const label = i === 0 ? "A" : "B";
      return probe ? [traceOf(page.transcripts.get(run.id), probe, label, label)] : [];
    });
  }, [page, a, b, probes, name]);
}

function Both({ a, b }: { a: Run; b: Run }) {
  const page = usePage();
  const theme = useTheme();
  const span = useView((state) => state.span);
  const probe = useView((state) => state.probe);
  const traces = useTraces(a, b);
  const { pointer, cells, marked } = usePointerActions(a.id, noRow);
  const lines = useCallback(() => {
    const extent = extentOf([page.transcripts.get(a.id), page.transcripts.get(b.id)]);
    const styles = new Map<string, LineStyle>([
      ["A", { ...lineStyle(theme, 0), dash: [] }],
      ["B", { ...lineStyle(theme, 1), dash: [6, 3] }],
    ]);
    return { traces: traces(), styles, chosen: "A", extent, shown: clipped(extent, span) };
  }, [page, a.id, b.id, theme, traces, span]);
  const strips = useCallback(() => {
    const [first, second] = traces();
    const extent = clipped(extentOf([page.transcripts.get(a.id), page.transcripts.get(b.id)]), span);
    const rows = first && second ? [first, second, difference(first, second)] : [];
    return { rows, chosen: null, extent, gutter: GUTTER, rowHeight: 18 };
  }, [page, a.id, b.id, traces, span]);
  const styles = lines().styles;
  return (
    <section className="panel compare-both" aria-labelledby="both-title">
      <header className="panel-head">
        <h2 id="both-title">{probe}, both runs</h2>
        {[...styles].map(([name, style]) => (
          <span key={name} className="faint">
            <Stroke style={style} /> {name}
          </span>
        ))}
        <Means a={a} b={b} />
        {span && (
          <button type="button" className="quiet" onClick={() => page.store.setState({ span: null })}>
            All tokens
          </button>
        )}
      </header>
      <Lines
        drawing={lines}
        runs={[a.id, b.id]}
        height={150}
        label="Both runs over tokens"
        pointer={pointer}
        marked={marked}
      />
      <Cells
        drawing={strips}
        runs={[a.id, b.id]}
        label="Run A, run B and their difference"
        pointer={cells}
        marked={marked}
      />
    </section>
  );
}

/** The chosen probe's mean over each answer, and their difference. */
function Means({ a, b }: { a: Run; b: Run }) {
  const page = usePage();
  const probe = useView((state) => state.probe);
  useTranscriptVersion(a.id);
  useTranscriptVersion(b.id);
  if (probe === null) return null;
  const [first, second] = [
    meanOf(page.transcripts.get(a.id), probe),
    meanOf(page.transcripts.get(b.id), probe),
  ];
  if (Number.isNaN(second - first)) return null;
  return (
    <span className="means">
      mean of the answer <span className="number">{score(first)}</span> and{" "}
      <span className="number">{score(second)}</span>, B − A{" "}
      <strong className="number">{signed(second - first)}</strong>
    </span>
  );
}

function meanOf(transcript: Transcript, probe: string): number {
  let [sum, num] = [0, 0];
  for (const value of transcript.scores.column(probe).subarray(transcript.promptLength)) {
    if (Number.isNaN(value)) continue;
    sum += value;
    num += 1;
  }
  return num === 0 ? NaN : sum / num;
}

const noRow = () => undefined;
