// The keyboard shortcuts of the page.
import { useEffect } from "react";
import { move, pin, shownFocus } from "../state/focus";
import { usePage, type Page } from "../state/page";
import { jump } from "./Crossings";
import { ordered } from "./sidebar/probeGroups";

const TYPING = "input, textarea, select, [contenteditable], dialog";
const STEP = 10;

export function useShortcuts(): void {
  const page = usePage();
  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
      if ((event.target as Element).closest(TYPING)) return;
      const act = moveOf(page, event) ?? letterOf(page, event);
      if (!act) return;
      event.preventDefault();
      act();
    };
    document.addEventListener("keydown", press);
    return () => document.removeEventListener("keydown", press);
  }, [page]);
}

type Act = (() => void) | null;

function moveOf(page: Page, { key, shiftKey, target }: KeyboardEvent): Act {
  const far = shiftKey ? STEP : 1;
  switch (key) {
    case "ArrowRight":
      return () => step(page, far);
    case "ArrowLeft":
      return () => step(page, -far);
    case "Home":
      return () => step(page, -Infinity);
    case "End":
      return () => step(page, Infinity);
    case "Escape":
      return () => page.focus.setState({ pin: null, hover: null, anchor: null });
    case "Enter":
      return isButton(target) ? null : () => pin(page.focus, shownFocus(page.focus.getState()), null);
    default:
      return null;
  }
}

function letterOf(page: Page, { key }: KeyboardEvent): Act {
  if (!page.store.getState().hasShortcuts) return null;
  switch (key) {
    case "p":
      return () => nextProbe(page, 1);
    case "P":
      return () => nextProbe(page, -1);
    case "n":
      return () => nextCrossing(page, 1);
    case "N":
      return () => nextCrossing(page, -1);
    case "/":
      return () => focusOn(page, "probe-search");
    case "s":
      return () => page.store.setState(({ pane }) => ({ pane: pane === "steer" ? "probes" : "steer" }));
    case "m":
      return () => focusOn(page, "message");
    case "+":
      return () => zoom(page, 0.5);
    case "-":
      return () => zoom(page, 2);
    case "0":
      return () => page.store.setState({ span: null });
    default:
      return null;
  }
}

function isButton(target: EventTarget | null): boolean {
  return (target as Element | null)?.closest("button, a, summary, label") != null;
}

function step(page: Page, by: number): void {
  const focus = shownFocus(page.focus.getState());
  const run = focus?.run ?? page.store.getState().head;
  if (run === null) return;
  const transcript = page.transcripts.get(run);
  move(page.focus, run, transcript, Math.max(-transcript.length, Math.min(transcript.length, by)));
  const moved = page.focus.getState().pin;
  if (moved) page.tokenViews.reveal(moved);
}

function nextProbe(page: Page, by: number): void {
  const { probes, probe } = page.store.getState();
  const names = ordered(probes ?? []).map(({ name }) => name);
  if (names.length === 0) return;
  const at = names.indexOf(probe ?? "");
  page.store.setState({ probe: names[(at + by + names.length) % names.length] ?? null });
}

/** Go to the next crossing of the chosen probe in the current run, wrapping around. */
function nextCrossing(page: Page, by: number): void {
  const { crossings, probe, head } = page.store.getState();
  const focus = shownFocus(page.focus.getState());
  const run = focus?.run ?? head;
  if (run === null) return;
  const transcript = page.transcripts.get(run);
  const here = focus ? transcript.rowOf(focus.token) : by > 0 ? -1 : Infinity;
  const ours = crossings.filter((each) => each.run === run && each.probe === probe);
  const found =
    by > 0
      ? (ours.find((each) => transcript.rowOf(each.peakAt) > here) ?? ours[0])
      : (ours.findLast((each) => transcript.rowOf(each.peakAt) < here) ?? ours.at(-1));
  if (found) jump(page, found);
}

function focusOn(page: Page, id: string): void {
  if (id === "probe-search") page.store.setState({ pane: "probes" });
  const element = document.getElementById(id);
  // Focus at once if possible, so that no letter typed after the shortcut is lost.
  if (element) element.focus();
  else page.frames.schedule(() => document.getElementById(id)?.focus());
}

/** Zoom around the marked token, or around the middle of the range. */
function zoom(page: Page, factor: number): void {
  const { head, span } = page.store.getState();
  const focus = shownFocus(page.focus.getState());
  const run = focus?.run ?? head;
  if (run === null) return;
  const transcript = page.transcripts.get(run);
  const [from, to] = span ?? [-transcript.promptLength, transcript.answerLength];
  const width = (to - from) * factor;
  if (width >= transcript.length) {
    page.store.setState({ span: null });
    return;
  }
  if (width < 8) return;
  const centre = focus ? transcript.rowOf(focus.token) - transcript.promptLength : (from + to) / 2;
  const first = Math.round(
    Math.min(Math.max(centre - width / 2, -transcript.promptLength), transcript.answerLength - width),
  );
  page.store.setState({ span: [first, first + Math.round(width)] });
}
