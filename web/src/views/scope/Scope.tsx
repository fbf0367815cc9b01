// Takes the run that is looked at; shows its scores as lines and as a matrix over one axis of tokens.
import { useCallback, useMemo, useState } from "react";
import { lineStyle, type LineStyle } from "../../colour/lines";
import { usePage } from "../../state/page";
import { pathTo } from "../../state/store";
import type { State } from "../../state/types";
import { count } from "../../text/number";
import { ordered } from "../rail/groups";
import { probeIn, useRun, useTapeVersion, useTheme, useView } from "../hooks";
import { Cells } from "./Cells";
import { Keys } from "./Keys";
import { Lines } from "./Lines";
import { GUTTER } from "./plot";
import { usePointing } from "./pointing";
import { clipped, extentOf, isCommon, traceOf } from "./traces";
import { useStore } from "zustand";

/** The run whose token is pinned, if it is in the conversation shown; else the newest. */
export function useScopeRun(): string | null {
  const page = usePage();
  const pinned = useStore(page.focus, (state) => state.pin?.run ?? null);
  return useView((state) => (isShown(state, pinned) ? pinned : state.head));
}

function isShown(state: State, run: string | null): boolean {
  return pathTo(state.runs, state.head).some(({ id }) => id === run);
}

export function Scope() {
  const id = useScopeRun();
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
    const tapes = id === null ? [] : [page.shelf.get(id)];
    const extent = extentOf(tapes);
    const traces = tapes.flatMap((tape) =>
      lines.flatMap((name) => {
        const found = probeIn(run, probes, name);
        return found ? [traceOf(tape, found)] : [];
      }),
    );
    return { traces, styles, chosen: probe, extent, shown: clipped(extent, span) };
  }, [page, id, run, probes, probe, lines, span, styles]);
  const { pointing, marked } = usePointing(id, noRow);
  const isShared = isCommon(drawing().traces);
  return (
    <section className="panel" aria-labelledby="lines-title">
      <header className="panel-head">
        <h2 id="lines-title">Over tokens</h2>
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
        pointing={pointing}
        marked={marked}
      />
      <Keys styles={styles} />
      {!isShared && <p className="note">Each line has its own range; the axis is that of {probe}.</p>}
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
  // Rounded, so that a run that grows does not render this anew at every token.
  const setScale = useCallback((exact: number) => setPerColumn(Math.round(exact * 10) / 10), []);
  const shown = useMemo(() => ordered(run?.probes.length ? run.probes : (probes ?? [])), [run, probes]);
  const drawing = useCallback(() => {
    const tapes = id === null ? [] : [page.shelf.get(id)];
    const rows = tapes.flatMap((tape) => shown.map((each) => traceOf(tape, each)));
    const extent = clipped(extentOf(tapes), span);
    return { rows, chosen: probe, extent, gutter: GUTTER, rowHeight: rowHeight(shown.length) };
  }, [page, id, shown, probe, span]);
  const choose = useCallback(
    (row: number) => {
      const name = shown[row]?.name;
      if (name !== undefined) page.store.setState({ probe: name });
    },
    [page, shown],
  );
  const { cells, marked } = usePointing(id, choose);
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
        pointing={cells}
        marked={marked}
        onScale={setScale}
      />
    </section>
  );
}

function Extent({ id, perColumn }: { id: string | null; perColumn: number }) {
  const page = usePage();
  useTapeVersion(id);
  const tape = id === null ? null : page.shelf.get(id);
  if (!tape || tape.length === 0) return null;
  return (
    <span className="faint">
      {count(tape.promptLength)} + {count(tape.answerLength)} tokens
      {perColumn > 1.01 && `, a column is the highest of ${perColumn.toFixed(perColumn < 10 ? 1 : 0)}`}
    </span>
  );
}

const noRow = () => undefined;

function rowHeight(rows: number): number {
  if (rows <= 12) return 16;
  return rows <= 24 ? 12 : rows <= 48 ? 6 : 4;
}
