// Takes what is typed; asks it, or stops the answer that is running.
import { useRef, useState } from "react";
import { usePage } from "../../state/page";
import { isServing, RUNNING } from "../../state/types";
import { useView } from "../hooks";
import { Settings } from "./Settings";

export function Composer() {
  const page = usePage();
  const draft = useView((state) => state.draft);
  const running = useView((state) => {
    const head = state.head === null ? undefined : state.runs[state.head];
    return head && RUNNING.has(head.status) ? head.id : null;
  });
  const isReady = useView(isServing);
  const isGone = useView((state) => state.link.kind === "unreachable");
  const hasTalk = useView((state) => state.head !== null);
  const [isOpen, setOpen] = useState(false);
  const box = useRef<HTMLTextAreaElement>(null);
  const send = () => {
    if (isReady && running === null) void page.chat.send();
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
          placeholder={invitation(isReady, isGone)}
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
        {hasTalk && (
          <button type="button" className="quiet" onClick={() => page.chat.startOver()}>
            New conversation
          </button>
        )}
        <span className="spring" />
        {running !== null ? (
          <button type="button" className="primary" onClick={() => void page.chat.stop(running)}>
            Stop
          </button>
        ) : (
          <button type="submit" className="primary" disabled={!isReady || draft.user.trim() === ""}>
            Ask
          </button>
        )}
      </div>
    </form>
  );
}

function invitation(isReady: boolean, isGone: boolean): string {
  if (isReady) return "Ask the model something";
  return isGone ? "The server does not answer" : "The engine is not ready yet";
}

function summary(system: string, isOpen: boolean): string {
  if (isOpen) return "Close settings";
  return system.trim() === "" ? "Settings" : "Settings (system prompt set)";
}
