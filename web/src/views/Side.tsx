// One of two compared runs: its settings, the steering applied to it, and its tokens.
import { useEffect } from "react";
import { usePage } from "../state/page";
import { samplingFields } from "../state/request";
import type { Run } from "../state/types";
import { counted } from "../text/number";
import { outcome } from "./chat/Turn";
import { useTranscriptVersion, useView } from "./hooks";
import { Applied } from "./steer/Applied";
import { TokenList, type SideDiff } from "./tokens/TokenList";

interface SideProps {
  run: Run;
  name: "A" | "B";
  diff: SideDiff;
  /** Shared by both sides, so that their answers start at the same height. */
  hasPrompt: boolean;
  onPrompt: (hasPrompt: boolean) => void;
}

export function Side({ run, name, diff, hasPrompt, onPrompt }: SideProps) {
  const page = usePage();
  useTranscriptVersion(run.id);
  useTranscriptVersion(diff.other);
  const isFrozen = useView((state) => state.isFrozen);
  const transcript = page.transcripts.get(run.id);
  const numDiffering = diff.read().size;
  const isSame =
    numDiffering === 0 && transcript.done !== null && page.transcripts.get(diff.other).done !== null;
  usePromptOnDemand(run.id, hasPrompt, onPrompt);
  const settings = Object.entries(samplingFields(run.sampling)).map(
    ([key, value]) => `${key} ${String(value)}`,
  );
  return (
    <article className="side" aria-label={`Run ${name}`}>
      <header>
        <div className="side-head">
          <h2>
            <span className="side-name">{name}</span> {run.user}
          </h2>
          {transcript.promptLength > 0 && (
            <button
              type="button"
              className="quiet"
              aria-expanded={hasPrompt}
              onClick={() => onPrompt(!hasPrompt)}
            >
              Prompt
            </button>
          )}
          {!isFrozen && (
            <button
              type="button"
              className="quiet"
              onClick={() => page.store.setState({ head: run.id, versus: null, span: null })}
            >
              Continue with {name}
            </button>
          )}
        </div>
        <p className="faint">
          {[
            run.steer.length > 0 ? "steered" : "plain",
            outcome(run, transcript),
            ...settings,
            run.system.trim() && `system: ${run.system.trim()}`,
          ]
            .filter(Boolean)
            .join(", ")}
          {isSame && ", the same tokens as the other run"}
          {numDiffering > 0 && (
            <>
              , {counted(numDiffering, "token")} <span className="differs-key" aria-hidden="true" /> not in
              the other run
            </>
          )}
        </p>
        <Applied run={run} />
        {run.error !== null && (
          <p className="failure" role="alert">
            {run.error}
          </p>
        )}
      </header>
      {hasPrompt && transcript.promptLength > 0 && (
        <TokenList
          run={run.id}
          from={0}
          to={transcript.promptLength}
          label={`Prompt of ${name}, token by token`}
        />
      )}
      <TokenList
        run={run.id}
        from={transcript.promptLength}
        to={null}
        label={`Answer of ${name}, token by token`}
        diff={diff}
      />
    </article>
  );
}

/** Opens the prompts when a hidden prompt token is to be shown, for example from the chart. */
function usePromptOnDemand(run: string, hasPrompt: boolean, onPrompt: (hasPrompt: boolean) => void): void {
  const page = usePage();
  useEffect(() => {
    if (hasPrompt) return;
    return page.tokenViews.add(run, {
      rectOf: () => null,
      reveal: (focus) => {
        if (focus.token.part !== "prompt") return false;
        onPrompt(true);
        page.frames.schedule(() => page.tokenViews.reveal(focus));
        return true;
      },
    });
  }, [page, run, hasPrompt, onPrompt]);
}
