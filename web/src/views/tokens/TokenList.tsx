// Takes a stretch of a run; shows its tokens coloured by the chosen probe, live, each one to be pointed at.
import { useLayoutEffect, useRef } from "react";
import { firings, type Firing } from "../../data/rules";
import type { Tape } from "../../data/tape";
import type { Page } from "../../state/page";
import { usePage } from "../../state/page";
import { hover, move, pin, type FocusState } from "../../state/focus";
import type { Focus } from "../../state/types";
import { probeIn } from "../hooks";
import { Flow } from "./flow";
import { painterOf } from "./paint";

interface Props {
  run: string;
  from: number;
  /** null: to the end, however far that moves. */
  to: number | null;
  label: string;
  /** In a comparison: which tokens of the answer the other run does not have. */
  differing?: Differing;
}

export interface Differing {
  other: string;
  read: () => ReadonlySet<number>;
}

export function TokenList({ run, from, to, label, differing }: Props) {
  const page = usePage();
  const host = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    if (!host.current) return;
    return attach(page, host.current, { run, from, to, differing: differing ?? null });
  }, [page, run, from, to, differing]);
  return <div ref={host} className="tokens" role="group" aria-label={label} tabIndex={0} />;
}

interface Stretch {
  run: string;
  from: number;
  to: number | null;
  differing: Differing | null;
}

function attach(page: Page, host: HTMLElement, { run, from, to, differing }: Stretch): () => void {
  const flow = new Flow(host, from);
  const tape = () => page.shelf.get(run);
  const painter = () => {
    const { runs, probes, probe } = page.store.getState();
    return painterOf(tape(), probeIn(runs[run] ?? null, probes, probe));
  };
  const compare = () => {
    if (differing) flow.note("differs", rowsOf(tape(), differing.read()));
  };
  const grow = () => {
    flow.grow(tape(), to ?? tape().length, painter());
    const { stop, probes } = page.store.getState().runs[run] ?? { stop: [], probes: [] };
    if (stop.length > 0) flow.note("fired", flagsOf(tape(), firings(tape(), stop, probes)));
    compare();
  };
  const mark = (state: FocusState) => {
    flow.mark(rowIn(state.hover), "hover");
    flow.mark(rowIn(state.pin), "pin");
  };
  /** Runs that are compared share the spot: the same token of either is marked. */
  const rowIn = (focus: Focus | null): number | null => {
    if (!focus || !isMarkedHere(page, focus.run, run) || !tape().has(focus.spot)) return null;
    const row = tape().flat(focus.spot);
    return row >= from && (to === null || row < to) ? row : null;
  };
  grow();
  mark(page.focus.getState());
  const stops = [
    page.shelf.watch(run, () => {
      grow();
      mark(page.focus.getState());
    }),
    page.store.subscribe((state, before) => {
      if (state.probe !== before.probe || state.probes !== before.probes) flow.recolour(painter());
      if (state.runs !== before.runs) compare(); // one that has ended is judged to its last token
    }),
    page.focus.subscribe(mark),
    page.places.add(run, {
      rectOf: (focus) => {
        const row = rowIn(focus);
        return row === null ? null : (flow.span(row)?.getBoundingClientRect() ?? null);
      },
      reveal: (focus) => {
        const row = rowIn(focus);
        if (row === null) return false;
        flow.span(row)?.scrollIntoView({ block: "nearest" });
        return true;
      },
    }),
    listen(page, host, run, flow),
    differing ? page.shelf.watch(differing.other, compare) : () => undefined,
  ];
  return () => stops.forEach((stop) => stop());
}

function rowsOf(tape: Tape, indices: ReadonlySet<number>): Map<number, string> {
  return new Map([...indices].map((index) => [tape.promptLength + index, ""]));
}

/** What is written behind the token at which rules fired. */
function flagsOf(tape: Tape, fired: readonly Firing[]): Map<number, string> {
  const flags = fired.flatMap(({ rule, indices }) =>
    indices.map((index) => [tape.promptLength + index, `${rule.action}: ${rule.probe}`] as const),
  );
  return new Map(flags);
}

function isMarkedHere(page: Page, focused: string, run: string): boolean {
  if (focused === run) return true;
  const { head, versus } = page.store.getState();
  return versus !== null && [head, versus].includes(focused) && [head, versus].includes(run);
}

/** One set of handlers for all tokens. */
function listen(page: Page, host: HTMLElement, run: string, flow: Flow): () => void {
  const target = (row: number): Focus => ({ run, spot: page.shelf.get(run).spot(row) });
  // Moves, not overs: tokens that scroll under a resting pointer are not pointed at.
  const over = (event: PointerEvent) => {
    if (event.pointerType === "touch") return;
    const row = flow.rowOf(event.target);
    hover(page.focus, row === null ? null : target(row), null);
  };
  const leave = () => hover(page.focus, null, null);
  const click = (event: MouseEvent) => {
    const isSelecting = getSelection()?.isCollapsed === false;
    const row = flow.rowOf(event.target);
    if (row !== null && !isSelecting) pin(page.focus, target(row), null);
  };
  const key = (event: KeyboardEvent) => {
    if (event.key !== "ArrowUp" && event.key !== "ArrowDown") return;
    const { pin: pinned } = page.focus.getState();
    const tape = page.shelf.get(run);
    if (pinned?.run !== run) return;
    const row = tape.flat(pinned.spot);
    const next = flow.lineStep(row, event.key === "ArrowUp" ? -1 : 1);
    if (next === row) return;
    event.preventDefault();
    event.stopPropagation();
    move(page.focus, run, tape, next - row);
    page.places.reveal({ run, spot: tape.spot(next) });
  };
  host.addEventListener("pointermove", over);
  host.addEventListener("pointerleave", leave);
  host.addEventListener("click", click);
  host.addEventListener("keydown", key);
  return () => {
    host.removeEventListener("pointermove", over);
    host.removeEventListener("pointerleave", leave);
    host.removeEventListener("click", click);
    host.removeEventListener("keydown", key);
  };
}
