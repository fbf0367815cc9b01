// The tooltip with all scores of the marked token.
import { useLayoutEffect, useRef } from "react";
import { useStore } from "zustand";
import type { Transcript } from "../../data/transcript";
import { isSame, shownFocus } from "../../state/focus";
import { usePage, type Page } from "../../state/page";
import type { Focus, Run } from "../../state/types";
import { count } from "../../text/number";
import { visible } from "../../text/token";
import { ordered } from "../sidebar/probeGroups";
import { probeIn, useTranscriptVersion, useView } from "../hooks";
import { ReferenceHistogram } from "./ReferenceHistogram";
import { placeTip } from "./placeTip";
import { ScoreRows } from "./ScoreRows";

export function Tip() {
  const page = usePage();
  const focus = useStore(page.focus, shownFocus);
  const isPinned = useStore(
    page.focus,
    (state) => state.pin !== null && isSame(shownFocus(state), state.pin),
  );
  const run = useView((state) => (focus ? (state.runs[focus.run] ?? null) : null));
  useTranscriptVersion(focus?.run ?? null);
  const box = useRef<HTMLElement>(null);
  useLayoutEffect(() => {
    const element = box.current;
    if (element && focus) position(page, element, focus);
  });
  const transcript = focus ? page.transcripts.get(focus.run) : null;
  if (!focus || !run || !transcript?.has(focus.token)) return null;
  return (
    <aside
      ref={box}
      className="tip"
      data-pinned={isPinned || undefined}
      aria-label="Scores of the marked token"
    >
      <Head transcript={transcript} focus={focus} isPinned={isPinned} />
      <Body run={run} transcript={transcript} focus={focus} />
    </aside>
  );
}

/** In a comparison, the scores of the other run's token are shown beside it. */
function Body({ run, transcript, focus }: { run: Run; transcript: Transcript; focus: Focus }) {
  const page = usePage();
  const probes = useView((state) => state.probes);
  const chosen = useView((state) => state.probe);
  const head = useView((state) => state.head);
  const versus = useView((state) => state.versus);
  const otherId = versus === null ? null : focus.run === head ? versus : head;
  const other = otherId === null ? null : page.transcripts.get(otherId);
  const row = transcript.rowOf(focus.token);
  const probe = probeIn(run, probes, chosen);
  const all = ordered(run.probes.length > 0 ? run.probes : (probes ?? []));
  return (
    <>
      {probe?.histogram && (
        <ReferenceHistogram
          probe={probe}
          histogram={probe.histogram}
          value={transcript.scores.value(probe.name, row)}
        />
      )}
      <p className="tip-why">{whyEmpty(transcript, row)}</p>
      <ScoreRows
        probes={all}
        transcript={transcript}
        row={row}
        other={other}
        otherRow={other?.has(focus.token) ? other.rowOf(focus.token) : null}
        isFirst={focus.run === head}
      />
    </>
  );
}

function Head({ transcript, focus, isPinned }: { transcript: Transcript; focus: Focus; isPinned: boolean }) {
  const page = usePage();
  const row = transcript.rowOf(focus.token);
  const { part, index } = focus.token;
  const media = transcript.media.get(row);
  return (
    <header className="tip-head">
      <code>{media ?? visible(transcript.tokens[row] ?? "")}</code>
      <span className="faint">
        {part} {count(index)}, {media ? "placeholder" : "id"} {transcript.ids[row]}
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

function whyEmpty(transcript: Transcript, row: number): string | null {
  if (!transcript.scores.hasArrived(row))
    return transcript.done ? "No score arrived for this token." : "Its scores have not arrived yet.";
  const hasAny = transcript.scores.names.some((name) => !Number.isNaN(transcript.scores.value(name, row)));
  if (hasAny) return null;
  if (row === transcript.length - 1) return "The last token is never read by the model, so it has no score.";
  return transcript.lost > 0 ? "Its scores were lost." : "It was not forwarded, so it has no score.";
}

function position(page: Page, element: HTMLElement, focus: Focus): void {
  const { anchor } = page.focus.getState();
  const rect = anchor ? new DOMRect(anchor.x - 8, anchor.y - 8, 16, 16) : page.tokenViews.rectOf(focus);
  const size = { width: element.offsetWidth, height: element.offsetHeight };
  const view = { width: innerWidth, height: innerHeight };
  const { left, top } = placeTip(rect, size, view);
  element.style.left = `${left}px`;
  element.style.top = `${top}px`;
}
