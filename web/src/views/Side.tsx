// Takes one of two runs that are compared; shows how it was asked, what was applied, and its tokens.
import { useEffect } from "react";
import { usePage } from "../state/page";
import { sent } from "../state/request";
import type { Run } from "../state/types";
import { counted } from "../text/number";
import { outcome } from "./chat/Turn";
import { useTapeVersion, useView } from "./hooks";
import { Applied } from "./steer/Applied";
import { TokenList, type Differing } from "./tokens/TokenList";

interface SideProps {
  run: Run;
  name: "A" | "B";
  differing: Differing;
  /** Of both sides, so that their answers begin at one height. */
  hasPrompt: boolean;
  onPrompt: (hasPrompt: boolean) => void;
}

export function Side({ run, name, differing, hasPrompt, onPrompt }: SideProps) {
  const page = usePage();
  useTapeVersion(run.id);
  useTapeVersion(differing.other);
  const isFrozen = useView((state) => state.isFrozen);
  const tape = page.shelf.get(run.id);
  const numDiffering = differing.read().size;
  const isSame = numDiffering === 0 && tape.done !== null && page.shelf.get(differing.other).done !== null;
  usePromptOnDemand(run.id, hasPrompt, onPrompt);
  const settings = Object.entries(sent(run.sampling)).map(([key, value]) => `${key} ${String(value)}`);
  return (
    <article className="side" aria-label={`Run ${name}`}>
      <header>
        <div className="side-head">
          <h2>
            <span className="side-name">{name}</span> {run.user}
          </h2>
          {tape.promptLength > 0 && (
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
              Go on with {name}
            </button>
          )}
        </div>
        <p className="faint">
          {[
            run.steer.length > 0 ? "steered" : "plain",
            outcome(run, tape),
            ...settings,
            run.system.trim() && `system: ${run.system.trim()}`,
          ]
            .filter(Boolean)
            .join(", ")}
          {isSame && ", every token in the other too"}
          {numDiffering > 0 && (
            <>
              , {counted(numDiffering, "token")} <span className="differs-key" aria-hidden="true" /> not in
              the other
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
      {hasPrompt && tape.promptLength > 0 && (
        <TokenList run={run.id} from={0} to={tape.promptLength} label={`Prompt of ${name}, token by token`} />
      )}
      <TokenList
        run={run.id}
        from={tape.promptLength}
        to={null}
        label={`Answer of ${name}, token by token`}
        differing={differing}
      />
    </article>
  );
}

/** A prompt token was asked for, in the chart perhaps: open the prompts, then show it. */
function usePromptOnDemand(run: string, hasPrompt: boolean, onPrompt: (hasPrompt: boolean) => void): void {
  const page = usePage();
  useEffect(() => {
    if (hasPrompt) return;
    return page.places.add(run, {
      rectOf: () => null,
      reveal: (focus) => {
        if (focus.spot.part !== "prompt") return false;
        onPrompt(true);
        page.beat.ask(() => page.places.reveal(focus));
        return true;
      },
    });
  }, [page, run, hasPrompt, onPrompt]);
}
