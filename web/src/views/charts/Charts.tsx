// The scores of one run as a line chart and as a matrix over the same axis of tokens.
import { useCallback, useMemo, useState } from "react";
import { lineStyle, type LineStyle } from "../../colour/lines";
import { usePage } from "../../state/page";
import { pathTo } from "../../state/store";
import type { State } from "../../state/types";
import { count } from "../../text/number";
import { ordered } from "../sidebar/probeGroups";
import { probeIn, useRun, useTranscriptVersion, useTheme, useView } from "../hooks";
import { Cells } from "./Cells";
import { LineLegend } from "./LineLegend";
import { Lines } from "./Lines";
import { GUTTER } from "./plot";
import { usePointerActions } from "./pointerActions";
import { clipped, extentOf, isCommon, traceOf } from "./traces";
import { useStore } from "zustand";

/** The run of the pinned token if the conversation contains it, else the newest run. */
export function useChartedRun(): string | null {
  const page = usePage();
  const pinned = useStore(page.focus, (state) => state.pin?.run ?? null);
  return useView((state) => (isShown(state, pinned) ? pinned : state.head));
}

function isShown(state: State, run: string | null): boolean {
  return pathTo(state.runs, state.head).some(({ id }) => id === run);
}

export function Charts() {
  const id = useChartedRun();
  return (
    <>
      <LinesPanel id={id} />
      <MatrixPanel id={id} />
    </>
  );
}

export function useLineStyles(lines: readonly string[]): Map<string, LineStyle> {
  const theme = useTheme();
  return useMemo(() => new Map(lines.map((name, slot) => [name, lineStyle(theme, slot)])), [lines, theme]);
}

function LinesPanel({ id }: { id: string | null }) {
  const page = usePage();
  const run = useRun(id);
  const probes = useView((state) => state.probes);
  const probe = useView((state) => state.probe);
  const lines = useView((state) => state.lines);
  const span = useView((state) => state.span);
  const styles = useLineStyles(lines);
  const drawing = useCallback(() => {
    const transcripts = id === null ? [] : [page.transcripts.get(id)];
    const extent = extentOf(transcripts);
    const traces = transcripts.flatMap((transcript) =>
      lines.flatMap((name) => {
        const found = probeIn(run, probes, name);
        return found ? [traceOf(transcript, found)] : [];
      }),
    );
    return { traces, styles, chosen: probe, extent, shown: clipped(extent, span) };
  }, [page, id, run, probes, probe, lines, span, styles]);
  const { pointer, marked } = usePointerActions(id, noRow);
  const isShared = isCommon(drawing().traces);
  return (
    <section className="panel" aria-labelledby="lines-title">
      <header className="panel-head">
        <h2 id="lines-title">Scores over tokens</h2>
        {span && (
          <button type="button" className="quiet" onClick={() => page.store.setState({ span: null })}>
            All tokens
          </button>
        )}
      </header>
      <Lines
        drawing={drawing}
        runs={id === null ? [] : [id]}
        height={190}
        label={`Line chart of ${lines.join(", ")} over tokens`}
        pointer={pointer}
        marked={marked}
      />
      <LineLegend styles={styles} />
      {!isShared && <p className="note">Each line has its own range; the axis shows the range of {probe}.</p>}
    </section>
  );
}

function MatrixPanel({ id }: { id: string | null }) {
  const page = usePage();
  const run = useRun(id);
  const probes = useView((state) => state.probes);
  const probe = useView((state) => state.probe);
  const span = useView((state) => state.span);
  const [perColumn, setPerColumn] = useState(1);
  // Rounded, so that a growing run does not render this at every token.
  const setScale = useCallback((exact: number) => setPerColumn(Math.round(exact * 10) / 10), []);
  const shown = useMemo(() => ordered(run?.probes.length ? run.probes : (probes ?? [])), [run, probes]);
  const drawing = useCallback(() => {
    const transcripts = id === null ? [] : [page.transcripts.get(id)];
    const rows = transcripts.flatMap((transcript) => shown.map((each) => traceOf(transcript, each)));
    const extent = clipped(extentOf(transcripts), span);
    return { rows, chosen: probe, extent, gutter: GUTTER, rowHeight: rowHeight(shown.length) };
  }, [page, id, shown, probe, span]);
  const choose = useCallback(
    (row: number) => {
      const name = shown[row]?.name;
      if (name !== undefined) page.store.setState({ probe: name });
    },
    [page, shown],
  );
  const { cells, marked } = usePointerActions(id, choose);
  return (
    <section className="panel" aria-labelledby="matrix-title">
      <header className="panel-head">
        <h2 id="matrix-title">All probes</h2>
        <Extent id={id} perColumn={perColumn} />
      </header>
      <Cells
        drawing={drawing}
        runs={id === null ? [] : [id]}
        label={`Matrix of ${shown.length} probes over tokens`}
        pointer={cells}
        marked={marked}
        onScale={setScale}
      />
    </section>
  );
}

function Extent({ id, perColumn }: { id: string | null; perColumn: number }) {
  const page = usePage();
  useTranscriptVersion(id);
  const transcript = id === null ? null : page.transcripts.get(id);
  if (!transcript || transcript.length === 0) return null;
  return (
    <span className="faint">
      {count(transcript.promptLength)} + {count(transcript.answerLength)} tokens
      {perColumn > 1.01 && `, each column shows the highest of ${perColumn.toFixed(perColumn < 10 ? 1 : 0)}`}
    </span>
  );
}

const noRow = () => undefined;

function rowHeight(rows: number): number {
  if (rows <= 12) return 16;
  return rows <= 24 ? 12 : rows <= 48 ? 6 : 4;
}
