// Shows the request exactly as it will be sent, and copies it as JSON, curl or Python.
import { useId, useState } from "react";
import { curl, python } from "../../export/snippets";
import { copyText } from "../../state/clipboard";
import { usePage, type Page } from "../../state/page";
import {
  nextQuestion,
  requestsOf,
  bodyOf,
  isPair,
  messagesOf,
  type CompletionBody,
} from "../../state/request";
import { pathTo } from "../../state/store";
import { useTranscriptVersion, useView } from "../hooks";

const FORMS = ["JSON", "curl", "Python"] as const;
type Form = (typeof FORMS)[number];

export function Preview() {
  const page = usePage();
  const id = useId();
  const [form, setForm] = useState<Form>("JSON");
  const [isCopied, setCopied] = useState(false);
  const isTwo = useView((state) => isPair(state.draft));
  // Render again when the draft, its place in the conversation or the answers before it change.
  useView((state) => state.draft);
  useView((state) => state.versus);
  useTranscriptVersion(useView((state) => state.head));
  const body = draftBody(page);
  if (!body) return null;
  const text = textOf(page, body, form);
  const copy = async () => {
    try {
      await copyText(text);
      setCopied(true);
      setTimeout(() => setCopied(false), 1500);
    } catch (error) {
      page.store.setState({ notice: String(error instanceof Error ? error.message : error) });
    }
  };
  return (
    <section className="preview" aria-labelledby={id}>
      <header className="panel-head">
        <h2 id={id}>Request</h2>
        <div className="forms" role="group" aria-label="Format">
          {FORMS.map((each) => (
            <button
              key={each}
              type="button"
              className="quiet"
              aria-pressed={form === each}
              onClick={() => setForm(each)}
            >
              {each}
            </button>
          ))}
        </div>
        <button type="button" onClick={() => void copy()}>
          {isCopied ? "Copied" : "Copy request"}
        </button>
      </header>
      <pre tabIndex={0} role="group" aria-label={`The request as ${form}`}>
        {text}
      </pre>
      {isTwo && <p className="note">The plain run is the same request without “steer”.</p>}
    </section>
  );
}

function textOf(page: Page, body: CompletionBody, form: Form): string {
  if (form === "curl") return curl(body, location.origin, page.hasKey());
  if (form === "Python") return python(body, location.origin, page.hasKey());
  return JSON.stringify(body, null, 2);
}

/** The body of the draft's request; of two, the steered one. */
function draftBody(page: Page): CompletionBody | null {
  const { draft, model, runs } = page.store.getState();
  const asked = requestsOf(draft, isPair(draft)).at(-1);
  if (model === null || !asked) return null;
  const { parent, user } = nextQuestion(page.store.getState());
  const before = pathTo(runs, parent);
  const answers = before.map(({ id }) => page.transcripts.get(id).text);
  return bodyOf({ model, ...asked }, messagesOf([...before, { user, system: draft.system }], answers));
}
