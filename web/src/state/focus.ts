// The token that every view marks: the hovered one, else the pinned one.
import { createStore, type StoreApi } from "zustand/vanilla";
import type { Transcript } from "../data/transcript";
import type { Focus } from "./types";

/** Where the tooltip points; null means at the token itself. */
export interface Anchor {
  x: number;
  y: number;
}

export interface FocusState {
  hover: Focus | null;
  pin: Focus | null;
  anchor: Anchor | null;
}

export type FocusStore = StoreApi<FocusState>;

export function createFocus(): FocusStore {
  return createStore<FocusState>(() => ({ hover: null, pin: null, anchor: null }));
}

/** A hovered token takes precedence over the pinned one. */
export function shownFocus(state: FocusState): Focus | null {
  return state.hover ?? state.pin;
}

export function isSame(a: Focus | null, b: Focus | null): boolean {
  if (a === null || b === null) return a === b;
  return a.run === b.run && a.token.part === b.token.part && a.token.index === b.token.index;
}

export function hover(store: FocusStore, target: Focus | null, anchor: Anchor | null): void {
  if (isSame(store.getState().hover, target)) return;
  store.setState({ hover: target, anchor });
}

/** Pin a token; pinning it again unpins it. */
export function pin(store: FocusStore, target: Focus | null, anchor: Anchor | null): void {
  const isAgain = target !== null && isSame(store.getState().pin, target);
  store.setState({ pin: isAgain ? null : target, hover: null, anchor: isAgain ? null : anchor });
}

/** Move the pin by `step` tokens within its run, stopping at either end. */
export function move(store: FocusStore, run: string, transcript: Transcript, step: number): void {
  if (transcript.length === 0) return;
  const state = store.getState();
  const at = state.pin ?? state.hover;
  const from = at?.run === run ? transcript.rowOf(at.token) : step > 0 ? -1 : transcript.length;
  const flat = Math.min(transcript.length - 1, Math.max(0, from + step));
  store.setState({ pin: { run, token: transcript.tokenAt(flat) }, hover: null, anchor: null });
}
