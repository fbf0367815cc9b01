// Lists the threshold crossings, newest first; each one leads to its token.
import { Fragment, memo, useEffect } from "react";
import type { Crossing } from "../data/crossings";
import type { Transcript } from "../data/transcript";
import { usePage, type Page } from "../state/page";
import { leafOf, pathTo } from "../state/store";
import { counted, score } from "../text/number";
import { visible } from "../text/token";
import { isNarrow, useRun, useView } from "./hooks";

const MAX_SHOWN = 100;

export function Crossings() {
  const page = usePage();
  const crossings = useView((state) => state.crossings);
  const dropped = useView((state) => state.numCrossingsDropped);
  const numUnseen = useView((state) => state.numUnseen);
  const head = useView((state) => state.head);
  const isLooking = useView((state) => state.pane === "crossings");
  useEffect(() => {
    if (isLooking && numUnseen > 0) page.store.setState({ numUnseen: 0 });
  }, [page, isLooking, numUnseen]);
  const newest = crossings.slice(-MAX_SHOWN).reverse();
  const hidden = dropped + crossings.length - newest.length;
  return (
    <section className="panel crossings" aria-labelledby="crossings-title">
      <header className="panel-head">
        <h2 id="crossings-title">Threshold crossings</h2>
        {newest.length > 0 && (
          // A new key restarts the highlight of a new crossing.
          <span key={crossings.length + dropped} className="faint arrival">
            {counted(crossings.length + dropped, "crossing")}
          </span>
        )}
      </header>
      {newest.length === 0 ? (
        <p className="empty">When a probe reaches its threshold, the token is listed here.</p>
      ) : (
        <ol className="log" aria-label="Crossings, newest first">
          {newest.map((each, i) => (
            <Fragment key={`${each.run} ${each.probe} ${each.first.part}${each.first.index}`}>
              {each.run !== (newest[i - 1]?.run ?? head) && <RunLine id={each.run} />}
              <Crossing crossing={each} />
            </Fragment>
          ))}
        </ol>
      )}
      {hidden > 0 && <p className="note">{counted(hidden, "older crossing")} not listed.</p>}
    </section>
  );
}

/** The heading of crossings that belong to a run other than the shown one. */
function RunLine({ id }: { id: string }) {
  const run = useRun(id);
  return <li className="log-run">In “{run?.user ?? "a deleted run"}”</li>;
}

/** Memoized: most of the list stays the same while one crossing grows. */
const Crossing = memo(function Crossing({ crossing }: { crossing: Crossing }) {
  const page = usePage();
  const { run, probe, first, last, peak } = crossing;
  const transcript = page.transcripts.get(run);
  const numTokens = last.index - first.index + 1;
  return (
    <li>
      <button type="button" onClick={() => jump(page, crossing)}>
        <span className="log-probe">{probe}</span>
        <span className="log-words">{words(transcript, crossing)}</span>
        <span className="number">{score(peak)}</span>
        <span className="faint">
          {first.part === "prompt" ? "p" : ""} {first.index}
          {numTokens > 1 && `–${last.index}`}
        </span>
      </button>
    </li>
  );
});

/** The crossing's tokens as text, short enough for a line. */
function words(transcript: Transcript, { first, last }: Crossing): string {
  const from = transcript.rowOf(first);
  const to = Math.min(transcript.rowOf(last) + 1, from + 12);
  const text = Array.from({ length: to - from }, (_, i) => transcript.wordAt(from + i)).join("");
  return visible(text).replaceAll("·", " ").trim() || visible(transcript.wordAt(from));
}

/** Show the run, the probe and the token. */
export function jump(page: Page, { run, probe, peakAt }: Crossing): void {
  const { runs, head } = page.store.getState();
  const isShown = pathTo(runs, head).some(({ id }) => id === run);
  page.store.setState({
    probe,
    ...(isNarrow() ? { pane: "chat" } : {}),
    ...(isShown ? {} : { head: leafOf(runs, run), versus: null, span: null }),
  });
  const focus = { run, token: peakAt };
  page.focus.setState({ pin: focus, hover: null, anchor: null });
  page.frames.schedule(() => page.tokenViews.reveal(focus));
}
