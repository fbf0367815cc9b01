// The steering that the engine applied to a run, and where stop rules fired.
import type { AppliedEntry } from "../../api/steering";
import { firings, stopWords, type Firing } from "../../data/rules";
import type { Transcript } from "../../data/transcript";
import { usePage } from "../../state/page";
import { RUNNING, type Run } from "../../state/types";
import { counted } from "../../text/number";
import { conditionWords, entryWords, ruleWords } from "../../text/steeringWords";
import { useTranscriptVersion } from "../hooks";

/** Renders nothing for a run without steering and stop rules. */
export function Applied({ run }: { run: Run }) {
  const page = usePage();
  useTranscriptVersion(run.id);
  const transcript = page.transcripts.get(run.id);
  const isSteered = run.steer.length > 0 || (transcript.echo?.steering.length ?? 0) > 0;
  if (!isSteered && run.stop.length === 0) return null;
  return (
    <div className="applied">
      {isSteered && <Echo run={run} transcript={transcript} />}
      {run.stop.length > 0 && <Rules run={run} transcript={transcript} />}
    </div>
  );
}

function Echo({ run, transcript }: { run: Run; transcript: Transcript }) {
  if (transcript.echo === null) {
    const isOver = !RUNNING.has(run.status);
    const said = isOver ? "Not confirmed by the engine" : "Requested";
    return <Entries title={said} entries={run.steer} />;
  }
  const { steering } = transcript.echo;
  if (steering.length === 0) return <p>Not steered: the engine applied no entry.</p>;
  return <Entries title="Applied" entries={steering} />;
}

function Entries({ title, entries }: { title: string; entries: readonly AppliedEntry[] }) {
  return (
    <ul aria-label={title}>
      {entries.map((entry, i) => (
        <li key={i}>
          <strong>
            {title}
            {entry.tier !== undefined && ` to every request (${entry.tier})`}
          </strong>{" "}
          {entryWords(entry)}
          {entry.digest !== undefined && (
            <code title={`Digest of the vector: ${entry.digest}`}>{entry.digest.slice(0, 8)}</code>
          )}
        </li>
      ))}
    </ul>
  );
}

function Rules({ run, transcript }: { run: Run; transcript: Transcript }) {
  const fired = firings(transcript, run.stop, run.probes);
  const reason = stopWords(transcript.done?.stop_reasons?.[0]);
  const isSeen = fired.some(({ rule }) => rule.action === "stop");
  const quiet = run.stop.filter((rule) => !fired.some((each) => each.rule === rule));
  return (
    <ul aria-label="Stop rules">
      {fired.map((firing, i) => (
        <FiredRule key={i} run={run} firing={firing} hasStopped={reason !== null} />
      ))}
      {reason !== null && !isSeen && (
        <li className="fired">
          <strong>Stopped:</strong> {reason}
        </li>
      )}
      {quiet.map((rule, i) => (
        <li key={i} className="faint">
          Not fired: {ruleWords(rule)}
        </li>
      ))}
    </ul>
  );
}

/** A rule that fired, with a button that shows the token. */
function FiredRule({ run, firing, hasStopped }: { run: Run; firing: Firing; hasStopped: boolean }) {
  const { rule, threshold, indices } = firing;
  const [index = 0] = indices;
  const word = rule.action === "alert" ? "Alert" : hasStopped ? "Stopped" : "Stop rule met";
  const page = usePage();
  const show = () => {
    const focus = { run: run.id, token: { part: "answer" as const, index } };
    page.store.setState({ probe: rule.probe });
    page.focus.setState({ pin: focus, hover: null, anchor: null });
    page.frames.schedule(() => page.tokenViews.reveal(focus));
  };
  return (
    <li className="fired">
      <button type="button" className="quiet" onClick={show}>
        ⚑ <strong>{word}</strong> at token {index}: {conditionWords(rule, threshold)}
        {indices.length > 1 && `, and ${counted(indices.length - 1, "more time")}`}
      </button>
    </li>
  );
}
