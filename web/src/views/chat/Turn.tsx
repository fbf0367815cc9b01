// One run as a turn of the conversation: its question, its answer and its actions.
import { useState } from "react";
import { stopWords } from "../../data/rules";
import type { Transcript } from "../../data/transcript";
import { copyText } from "../../state/clipboard";
import { usePage } from "../../state/page";
import type { Run } from "../../state/types";
import { RUNNING } from "../../state/types";
import { counted } from "../../text/number";
import { useTranscriptVersion, useView } from "../hooks";
import { Applied } from "../steer/Applied";
import { TokenList } from "../tokens/TokenList";
import { Markdown } from "./Markdown";
import { Question } from "./Question";
import { Variants } from "./Variants";

export function Turn({ run }: { run: Run }) {
  const page = usePage();
  useTranscriptVersion(run.id);
  const hasMarkdown = useView((state) => state.hasMarkdown);
  const transcript = page.transcripts.get(run.id);
  return (
    <article className="turn" aria-label={`Question: ${run.user.slice(0, 80)}`}>
      <Question run={run} promptLength={transcript.promptLength} />
      <section className="answer" aria-label="Answer">
        <h2 className="who">
          {run.model} <span className="faint">{outcome(run, transcript)}</span>
        </h2>
        <Applied run={run} />
        {hasMarkdown ? (
          <Markdown text={transcript.text} />
        ) : (
          <TokenList run={run.id} from={transcript.promptLength} to={null} label="Answer, token by token" />
        )}
        {transcript.lost > 0 && (
          <p className="warning" role="status">
            {counted(transcript.lost, "token")} lost {transcript.lost === 1 ? "its" : "their"} scores because
            the reader was too slow. Nothing else is affected.
          </p>
        )}
        {run.error !== null && (
          <p className="failure" role="alert">
            {run.error}
          </p>
        )}
        <Actions run={run} />
      </section>
    </article>
  );
}

/** The run's progress, or how it ended. */
export function outcome(run: Run, transcript: Transcript): string {
  const tokens = transcript.answerLength;
  const reason = transcript.done?.finish_reasons[0];
  const isRuled = stopWords(transcript.done?.stop_reasons?.[0]) !== null;
  if (run.status === "opening") return "waiting for the first token";
  if (run.status === "reconnecting") return `${counted(tokens, "token")}, connection lost, reconnecting`;
  if (run.status === "streaming") return counted(tokens, "token");
  const ends: Partial<Record<Run["status"], string>> = {
    stopped: "stopped",
    interrupted: "interrupted",
    failed: "failed",
  };
  const end =
    ends[run.status] ?? (isRuled ? "stopped by a rule" : reason === "length" ? "ended at max tokens" : null);
  return [counted(tokens, "token"), end].filter(Boolean).join(", ");
}

function Actions({ run }: { run: Run }) {
  const page = usePage();
  const isFrozen = useView((state) => state.isFrozen);
  const [isCopied, setCopied] = useState(false);
  if (isFrozen) return null;
  if (RUNNING.has(run.status)) {
    return (
      <p className="actions">
        <button type="button" onClick={() => void page.chat.stop(run.id)}>
          Stop
        </button>
      </p>
    );
  }
  const copy = async () => {
    try {
      await copyText(page.transcripts.get(run.id).text);
      setCopied(true);
      setTimeout(() => setCopied(false), 1500);
    } catch (error) {
      page.store.setState({ notice: String(error instanceof Error ? error.message : error) });
    }
  };
  return (
    <p className="actions">
      <button type="button" className="quiet" onClick={() => void page.chat.regenerate(run.id)}>
        Regenerate
      </button>
      <button type="button" className="quiet" onClick={() => void copy()}>
        {isCopied ? "Copied" : "Copy text"}
      </button>
      <Variants run={run} />
    </p>
  );
}
