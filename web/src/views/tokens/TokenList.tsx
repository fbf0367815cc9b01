// A range of a run's tokens, coloured by the chosen probe; each can be hovered and pinned.
import { useLayoutEffect, useRef } from "react";
import { firings, type Firing } from "../../data/rules";
import type { Transcript } from "../../data/transcript";
import type { Page } from "../../state/page";
import { usePage } from "../../state/page";
import { hover, move, pin, type FocusState } from "../../state/focus";
import type { Focus } from "../../state/types";
import { probeIn } from "../hooks";
import { TokenSpans } from "./tokenSpans";
import { tokenClasses } from "./tokenClasses";

interface Props {
  run: string;
  from: number;
  /** null: up to the end of the run, also while it grows. */
  to: number | null;
  label: string;
  /** In a comparison, the tokens of the answer that the other run does not have. */
  diff?: SideDiff;
}

export interface SideDiff {
  other: string;
  read: () => ReadonlySet<number>;
}

export function TokenList({ run, from, to, label, diff }: Props) {
  const page = usePage();
  const host = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    if (!host.current) return;
    return attach(page, host.current, { run, from, to, diff: diff ?? null });
  }, [page, run, from, to, diff]);
  return <div ref={host} className="tokens" role="group" aria-label={label} tabIndex={0} />;
}

interface Stretch {
  run: string;
  from: number;
  to: number | null;
  diff: SideDiff | null;
}

function attach(page: Page, host: HTMLElement, { run, from, to, diff }: Stretch): () => void {
  const spans = new TokenSpans(host, from);
  const transcript = () => page.transcripts.get(run);
  const classes = () => {
    const { runs, probes, probe } = page.store.getState();
    return tokenClasses(transcript(), probeIn(runs[run] ?? null, probes, probe));
  };
  const compare = () => {
    if (diff) spans.annotate("differs", rowsOf(transcript(), diff.read()));
  };
  const grow = () => {
    spans.grow(transcript(), to ?? transcript().length, classes());
    const { stop, probes } = page.store.getState().runs[run] ?? { stop: [], probes: [] };
    if (stop.length > 0) spans.annotate("fired", flagsOf(transcript(), firings(transcript(), stop, probes)));
    compare();
  };
  const mark = (state: FocusState) => {
    spans.mark(rowIn(state.hover), "hover");
    spans.mark(rowIn(state.pin), "pin");
  };
  /** Compared runs share the focus: the same token is marked in both. */
  const rowIn = (focus: Focus | null): number | null => {
    if (!focus || !isMarkedHere(page, focus.run, run) || !transcript().has(focus.token)) return null;
    const row = transcript().rowOf(focus.token);
    return row >= from && (to === null || row < to) ? row : null;
  };
  grow();
  mark(page.focus.getState());
  const stops = [
    page.transcripts.subscribe(run, () => {
      grow();
      mark(page.focus.getState());
    }),
    page.store.subscribe((state, before) => {
      if (state.probe !== before.probe || state.probes !== before.probes) spans.recolour(classes());
      if (state.runs !== before.runs) compare(); // an answer that has ended is compared to its last token
    }),
    page.focus.subscribe(mark),
    page.tokenViews.add(run, {
      rectOf: (focus) => {
        const row = rowIn(focus);
        return row === null ? null : (spans.span(row)?.getBoundingClientRect() ?? null);
      },
      reveal: (focus) => {
        const row = rowIn(focus);
        if (row === null) return false;
        spans.span(row)?.scrollIntoView({ block: "nearest" });
        return true;
      },
    }),
    listen(page, host, run, spans),
    diff ? page.transcripts.subscribe(diff.other, compare) : () => undefined,
  ];
  return () => stops.forEach((stop) => stop());
}

function rowsOf(transcript: Transcript, indices: ReadonlySet<number>): Map<number, string> {
  return new Map([...indices].map((index) => [transcript.promptLength + index, ""]));
}

/** The flags shown at the tokens where rules fired. */
function flagsOf(transcript: Transcript, fired: readonly Firing[]): Map<number, string> {
  const flags = fired.flatMap(({ rule, indices }) =>
    indices.map((index) => [transcript.promptLength + index, `${rule.action}: ${rule.probe}`] as const),
  );
  return new Map(flags);
}

function isMarkedHere(page: Page, focused: string, run: string): boolean {
  if (focused === run) return true;
  const { head, versus } = page.store.getState();
  return versus !== null && [head, versus].includes(focused) && [head, versus].includes(run);
}

/** One set of event handlers for all tokens. */
function listen(page: Page, host: HTMLElement, run: string, spans: TokenSpans): () => void {
  const target = (row: number): Focus => ({ run, token: page.transcripts.get(run).tokenAt(row) });
  // pointermove, not pointerover: tokens that scroll under a resting pointer are not hovered.
  const over = (event: PointerEvent) => {
    if (event.pointerType === "touch") return;
    const row = spans.rowOf(event.target);
    hover(page.focus, row === null ? null : target(row), null);
  };
  const leave = () => hover(page.focus, null, null);
  const click = (event: MouseEvent) => {
    const isSelecting = getSelection()?.isCollapsed === false;
    const row = spans.rowOf(event.target);
    if (row !== null && !isSelecting) pin(page.focus, target(row), null);
  };
  const key = (event: KeyboardEvent) => {
    if (event.key !== "ArrowUp" && event.key !== "ArrowDown") return;
    const { pin: pinned } = page.focus.getState();
    const transcript = page.transcripts.get(run);
    if (pinned?.run !== run) return;
    const row = transcript.rowOf(pinned.token);
    const next = spans.lineStep(row, event.key === "ArrowUp" ? -1 : 1);
    if (next === row) return;
    event.preventDefault();
    event.stopPropagation();
    move(page.focus, run, transcript, next - row);
    page.tokenViews.reveal({ run, token: transcript.tokenAt(next) });
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
