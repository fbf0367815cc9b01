// Takes the log of threshold crossings; lists them, newest first, each a way to its token.
import { Fragment, memo, useEffect } from "react";
import type { Excursion } from "../data/excursions";
import type { Tape } from "../data/tape";
import { usePage, type Page } from "../state/page";
import { leafOf, pathTo } from "../state/store";
import { counted, score } from "../text/number";
import { visible } from "../text/token";
import { isNarrow, useRun, useView } from "./hooks";

const MAX_SHOWN = 100;

export function Crossings() {
  const page = usePage();
  const excursions = useView((state) => state.excursions);
  const dropped = useView((state) => state.numExcursionsDropped);
  const numUnseen = useView((state) => state.numUnseen);
  const head = useView((state) => state.head);
  const isLooking = useView((state) => state.pane === "crossings");
  useEffect(() => {
    if (isLooking && numUnseen > 0) page.store.setState({ numUnseen: 0 });
  }, [page, isLooking, numUnseen]);
  const newest = excursions.slice(-MAX_SHOWN).reverse();
  const hidden = dropped + excursions.length - newest.length;
  return (
    <section className="panel crossings" aria-labelledby="crossings-title">
      <header className="panel-head">
        <h2 id="crossings-title">Threshold crossings</h2>
        {newest.length > 0 && (
          // Another key starts the flash anew: something was crossed just now.
          <span key={excursions.length + dropped} className="faint arrival">
            {counted(excursions.length + dropped, "crossing")}
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
              <Crossing excursion={each} />
            </Fragment>
          ))}
        </ol>
      )}
      {hidden > 0 && <p className="note">{counted(hidden, "older crossing")} not listed.</p>}
    </section>
  );
}

/** What follows belongs to another run than the one shown. */
function RunLine({ id }: { id: string }) {
  const run = useRun(id);
  return <li className="log-run">In “{run?.user ?? "a run that is gone"}”</li>;
}

/** Most of the list stays as it is while one stretch grows. */
const Crossing = memo(function Crossing({ excursion }: { excursion: Excursion }) {
  const page = usePage();
  const { run, probe, first, last, peak } = excursion;
  const tape = page.shelf.get(run);
  const numTokens = last.index - first.index + 1;
  return (
    <li>
      <button type="button" onClick={() => jump(page, excursion)}>
        <span className="log-probe">{probe}</span>
        <span className="log-words">{words(tape, excursion)}</span>
        <span className="number">{score(peak)}</span>
        <span className="faint">
          {first.part === "prompt" ? "p" : ""} {first.index}
          {numTokens > 1 && `–${last.index}`}
        </span>
      </button>
    </li>
  );
});

/** The stretch as text, short enough for a line. */
function words(tape: Tape, { first, last }: Excursion): string {
  const from = tape.flat(first);
  const to = Math.min(tape.flat(last) + 1, from + 12);
  return (
    visible(tape.tokens.slice(from, to).join("")).replaceAll("·", " ").trim() ||
    visible(tape.tokens[from] ?? "")
  );
}

/** Show the run, the probe and the token. */
export function jump(page: Page, { run, probe, peakAt }: Excursion): void {
  const { runs, head } = page.store.getState();
  const isShown = pathTo(runs, head).some(({ id }) => id === run);
  page.store.setState({
    probe,
    ...(isNarrow() ? { pane: "chat" } : {}),
    ...(isShown ? {} : { head: leafOf(runs, run), versus: null, span: null }),
  });
  const focus = { run, spot: peakAt };
  page.focus.setState({ pin: focus, hover: null, anchor: null });
  page.beat.ask(() => page.places.reveal(focus));
}
