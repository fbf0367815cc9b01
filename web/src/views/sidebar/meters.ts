// Moves the meters of the probe list to the scores of the marked or the newest token.
import { useEffect, type RefObject } from "react";
import type { ProbeInfo } from "../../api/types";
import { domainOf, fraction, isOver } from "../../colour/domain";
import { shownFocus } from "../../state/focus";
import { usePage, type Page } from "../../state/page";

/** Dozens of meters follow the pointer, so each costs one style change instead of one render. They are
 * updated after every render, because a search may have added others to the page. */
export function useMeters(list: RefObject<HTMLElement | null>, probes: readonly ProbeInfo[]): void {
  const page = usePage();
  useEffect(() => {
    const domains = new Map(probes.map((probe) => [probe.name, { probe, domain: domainOf(probe) }]));
    const move = () => {
      for (const meter of list.current?.querySelectorAll<HTMLElement>(".meter") ?? []) {
        const known = domains.get(meter.dataset.probe ?? "");
        const value = known ? valueNow(page, known.probe.name) : NaN;
        const isKnown = known !== undefined && !Number.isNaN(value);
        const fill = meter.firstElementChild as HTMLElement;
        fill.style.transform = `scaleX(${isKnown ? fraction(known.domain, value) : 0})`;
        meter.toggleAttribute("data-over", isKnown && isOver(known.probe.threshold, value));
      }
    };
    const ask = () => page.frames.schedule(move);
    ask();
    let unwatch = watchHead(page, ask);
    const stops = [
      page.focus.subscribe(ask),
      page.store.subscribe((state, before) => {
        if (state.head === before.head) return;
        unwatch();
        unwatch = watchHead(page, ask);
        ask();
      }),
      () => unwatch(),
    ];
    return () => stops.forEach((stop) => stop());
  });
}

function watchHead(page: Page, ask: () => void): () => void {
  const { head } = page.store.getState();
  return head === null ? () => undefined : page.transcripts.subscribe(head, ask);
}

function valueNow(page: Page, name: string): number {
  const focus = shownFocus(page.focus.getState());
  if (focus) {
    const transcript = page.transcripts.get(focus.run);
    return transcript.scores.value(name, transcript.rowOf(focus.token));
  }
  const { head } = page.store.getState();
  return head === null ? NaN : newest(page, head, name);
}

/** The newest available score; the last token of an answer never has one. */
function newest(page: Page, run: string, name: string): number {
  const { scores, length } = page.transcripts.get(run);
  for (let row = length - 1; row >= Math.max(0, length - 8); row -= 1) {
    const value = scores.value(name, row);
    if (!Number.isNaN(value)) return value;
  }
  return NaN;
}
