// Takes the marked token; shows its exact scores of all probes in the one tooltip of the page.
import { useLayoutEffect, useRef } from "react";
import { useStore } from "zustand";
import type { Tape } from "../../data/tape";
import { isSame, shownFocus } from "../../state/focus";
import { usePage, type Page } from "../../state/page";
import type { Focus, Run } from "../../state/types";
import { count } from "../../text/number";
import { visible } from "../../text/token";
import { ordered } from "../rail/groups";
import { probeIn, useTapeVersion, useView } from "../hooks";
import { ReferenceHistogram } from "./ReferenceHistogram";
import { placed } from "./placed";
import { ScoreRows } from "./ScoreRows";

export function Tip() {
  const page = usePage();
  const focus = useStore(page.focus, shownFocus);
  const isPinned = useStore(
    page.focus,
    (state) => state.pin !== null && isSame(shownFocus(state), state.pin),
  );
  const run = useView((state) => (focus ? (state.runs[focus.run] ?? null) : null));
  useTapeVersion(focus?.run ?? null);
  const box = useRef<HTMLElement>(null);
  useLayoutEffect(() => {
    const element = box.current;
    if (element && focus) position(page, element, focus);
  });
  const tape = focus ? page.shelf.get(focus.run) : null;
  if (!focus || !run || !tape?.has(focus.spot)) return null;
  return (
    <aside
      ref={box}
      className="tip"
      data-pinned={isPinned || undefined}
      aria-label="Scores of the marked token"
    >
      <Head tape={tape} focus={focus} isPinned={isPinned} />
      <Body run={run} tape={tape} focus={focus} />
    </aside>
  );
}

/** In compared runs the same token of the other run is shown beside it. */
function Body({ run, tape, focus }: { run: Run; tape: Tape; focus: Focus }) {
  const page = usePage();
  const probes = useView((state) => state.probes);
  const chosen = useView((state) => state.probe);
  const head = useView((state) => state.head);
  const versus = useView((state) => state.versus);
  const otherId = versus === null ? null : focus.run === head ? versus : head;
  const other = otherId === null ? null : page.shelf.get(otherId);
  const row = tape.flat(focus.spot);
  const probe = probeIn(run, probes, chosen);
  const all = ordered(run.probes.length > 0 ? run.probes : (probes ?? []));
  return (
    <>
      {probe?.histogram && (
        <ReferenceHistogram
          probe={probe}
          histogram={probe.histogram}
          value={tape.scores.value(probe.name, row)}
        />
      )}
      <p className="tip-why">{whyEmpty(tape, row)}</p>
      <ScoreRows
        probes={all}
        tape={tape}
        row={row}
        other={other}
        otherRow={other?.has(focus.spot) ? other.flat(focus.spot) : null}
        isFirst={focus.run === head}
      />
    </>
  );
}

function Head({ tape, focus, isPinned }: { tape: Tape; focus: Focus; isPinned: boolean }) {
  const page = usePage();
  const row = tape.flat(focus.spot);
  const { part, index } = focus.spot;
  return (
    <header className="tip-head">
      <code>{visible(tape.tokens[row] ?? "")}</code>
      <span className="faint">
        {part} {count(index)}, id {tape.ids[row]}
      </span>
      {isPinned && (
        <button
          type="button"
          className="quiet"
          onClick={() => page.focus.setState({ pin: null, anchor: null })}
        >
          Unpin
        </button>
      )}
    </header>
  );
}

function whyEmpty(tape: Tape, row: number): string | null {
  if (!tape.scores.hasArrived(row))
    return tape.done ? "No score came for this token." : "Its scores are on their way.";
  const hasAny = tape.scores.names.some((name) => !Number.isNaN(tape.scores.value(name, row)));
  if (hasAny) return null;
  if (row === tape.length - 1) return "The last token is never read by the model, so it has no score.";
  return tape.lost > 0 ? "Its scores were lost on the way." : "It was not forwarded, so it has no score.";
}

function position(page: Page, element: HTMLElement, focus: Focus): void {
  const { anchor } = page.focus.getState();
  const rect = anchor ? new DOMRect(anchor.x - 8, anchor.y - 8, 16, 16) : page.places.rectOf(focus);
  const size = { width: element.offsetWidth, height: element.offsetHeight };
  const view = { width: innerWidth, height: innerHeight };
  const { left, top } = placed(rect, size, view);
  element.style.left = `${left}px`;
  element.style.top = `${top}px`;
}
