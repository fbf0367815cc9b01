// The user's question as tokens of the prompt, with the rest of the prompt on demand.
import { useEffect, useMemo, useState } from "react";
import { usePage } from "../../state/page";
import type { Run } from "../../state/types";
import { counted } from "../../text/number";
import { locate, type TokenRange } from "../../text/locate";
import { useView } from "../hooks";
import { TokenList } from "../tokens/TokenList";

export function Question({ run, promptLength }: { run: Run; promptLength: number }) {
  const page = usePage();
  const [isEditing, setEditing] = useState(false);
  const [isWhole, setWhole] = useState(false);
  const isFrozen = useView((state) => state.isFrozen);
  const range = useMemo(
    () => locate(page.transcripts.get(run.id).tokens.slice(0, promptLength), run.user),
    [page, run.id, run.user, promptLength],
  );
  useEffect(() => {
    if (isWhole) return;
    // Open the whole prompt when a token outside the question is to be shown.
    return page.tokenViews.add(run.id, {
      rectOf: () => null,
      reveal: (focus) => {
        if (focus.run !== run.id || focus.token.part !== "prompt") return false;
        setWhole(true);
        page.frames.schedule(() => page.tokenViews.reveal(focus));
        return true;
      },
    });
  }, [page, run.id, isWhole]);
  const numOther = promptLength - (range ? range[1] - range[0] : 0);
  return (
    <section className="question" aria-label="Question">
      <h2 className="who">
        You
        {promptLength > 0 && (
          <button type="button" className="quiet" aria-expanded={isWhole} onClick={() => setWhole(!isWhole)}>
            {isWhole ? "Only my words" : `Show ${counted(numOther, "more prompt token")}`}
          </button>
        )}
        {!isFrozen && !isEditing && (
          <button type="button" className="quiet" onClick={() => setEditing(true)}>
            Edit
          </button>
        )}
      </h2>
      {isEditing ? (
        <Editor run={run} onClose={() => setEditing(false)} />
      ) : (
        <Words run={run} promptLength={promptLength} range={range} isWhole={isWhole} />
      )}
    </section>
  );
}

interface WordsProps {
  run: Run;
  promptLength: number;
  range: TokenRange | null;
  isWhole: boolean;
}

function Words({ run, promptLength, range, isWhole }: WordsProps) {
  if (promptLength === 0 || (!range && !isWhole)) return <p className="plain-words">{run.user}</p>;
  const [from, to] = isWhole || !range ? [0, promptLength] : range;
  const label = isWhole ? "Whole prompt, token by token" : "Question, token by token";
  return <TokenList run={run.id} from={from} to={to} label={label} />;
}

function Editor({ run, onClose }: { run: Run; onClose: () => void }) {
  const page = usePage();
  const [text, setText] = useState(run.user);
  const send = () => {
    onClose();
    void page.chat.edit(run.id, text);
  };
  return (
    <form
      className="editor"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      <label>
        <span className="hidden">Edit the question</span>
        <textarea
          value={text}
          rows={Math.min(8, text.split("\n").length + 1)}
          onChange={(event) => setText(event.target.value)}
          onKeyDown={(event) => {
            if (event.key === "Escape") onClose();
          }}
        />
      </label>
      <p className="actions">
        <button type="submit" className="primary" disabled={text.trim() === ""}>
          Ask again
        </button>
        <button type="button" className="quiet" onClick={onClose}>
          Cancel
        </button>
        <span className="faint">The old answer stays in the history.</span>
      </p>
    </form>
  );
}
