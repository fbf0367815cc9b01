// The form that asks the next question, or stops the running answer.
import { useRef, useState } from "react";
import { entryOf, isOn } from "../../data/entryDraft";
import { usePage } from "../../state/page";
import { nextQuestion, isPair } from "../../state/request";
import { isServing, RUNNING, type Draft, type Run } from "../../state/types";
import { counted } from "../../text/number";
import { actWords } from "../../text/steeringWords";
import { isNarrow, useView } from "../hooks";
import { Settings } from "./Settings";

export function Composer() {
  const page = usePage();
  const draft = useView((state) => state.draft);
  // Joined into a string: a new array on every call would render without end.
  const running = useView((state) =>
    [state.head, state.versus].filter((id) => isRunning(id === null ? undefined : state.runs[id])).join(" "),
  );
  const hasWords = useView((state) => nextQuestion(state).user !== "");
  const isTwo = useView((state) => isPair(state.draft));
  const compared = useView((state) =>
    state.head === null || state.versus === null ? null : (state.runs[state.head]?.user ?? null),
  );
  const isReady = useView(isServing);
  const isGone = useView((state) => state.connection.kind === "unreachable");
  const hasTalk = useView((state) => state.head !== null);
  const [isOpen, setOpen] = useState(false);
  const box = useRef<HTMLTextAreaElement>(null);
  const send = () => {
    if (isReady && running === "") void page.chat.send();
  };
  return (
    <form
      className="composer"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      {isOpen && <Settings />}
      <label className="composer-box">
        <span className="hidden">Message</span>
        <textarea
          ref={box}
          id="message"
          rows={2}
          placeholder={placeholderText(isReady, isGone, compared)}
          value={draft.user}
          onChange={(event) => page.store.setState({ draft: { ...draft, user: event.target.value } })}
          onKeyDown={(event) => {
            if (event.key !== "Enter" || event.shiftKey || event.nativeEvent.isComposing) return;
            event.preventDefault();
            send();
          }}
        />
      </label>
      <div className="composer-row">
        <button type="button" className="quiet" aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>
          {summary(draft.system, isOpen)}
        </button>
        <SteerButton />
        {hasTalk && compared === null && (
          <button type="button" className="quiet" onClick={() => page.chat.startOver()}>
            New conversation
          </button>
        )}
        <span className="spring" />
        {running !== "" ? (
          <button
            type="button"
            className="primary"
            onClick={() => running.split(" ").forEach((id) => void page.chat.stop(id))}
          >
            Stop
          </button>
        ) : (
          <button type="submit" className="primary" disabled={!isReady || !hasWords}>
            {isTwo ? "Ask both" : "Ask"}
          </button>
        )}
      </div>
    </form>
  );
}

/** Shows the steering of the next question, and opens the steering panel. */
function SteerButton() {
  const page = usePage();
  const isOpen = useView((state) => state.pane === "steer");
  const words = useView(({ draft }) => steerWords(draft));
  const toggle = () => page.store.setState({ pane: isOpen ? (isNarrow() ? "chat" : "probes") : "steer" });
  return (
    <button type="button" className="quiet steer-button" aria-expanded={isOpen} onClick={toggle}>
      {words === "" ? "Steering" : <strong>Steering: {words}</strong>}
    </button>
  );
}

function steerWords(draft: Draft): string {
  const numRules = draft.rules.length;
  const acts = draft.entries.filter(isOn).map((entry) => actWords(entryOf(entry)));
  return [...acts, ...(numRules > 0 ? [counted(numRules, "stop rule")] : [])].join(", ");
}

function isRunning(run: Run | undefined): boolean {
  return run !== undefined && RUNNING.has(run.status);
}

function placeholderText(isReady: boolean, isGone: boolean, compared: string | null): string {
  if (isReady && compared !== null)
    return `Ask something else, or leave this empty to ask again: ${compared}`;
  if (isReady) return "Ask the model something";
  return isGone ? "The server does not respond" : "The engine is not ready yet";
}

function summary(system: string, isOpen: boolean): string {
  if (isOpen) return "Close settings";
  return system.trim() === "" ? "Settings" : "Settings (system prompt set)";
}
