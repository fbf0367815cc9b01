// The first screen: what the page shows, and example questions.
import type { Example } from "../../api/types";
import { usePage } from "../../state/page";
import { isServing } from "../../state/types";
import { inWords } from "../../text/number";
import { useView } from "../hooks";

export function FirstScreen() {
  const examples = useView((state) => state.examples);
  const numProbes = useView((state) => state.probes?.length ?? 0);
  return (
    <div className="first">
      <p className="first-sentence">
        While the model reads your words and writes its own,{" "}
        {numProbes > 1 ? `${inWords(numProbes)} probes` : numProbes === 1 ? "a probe" : "probes"} inside it
        score every token, and the colour of a token is its score.
      </p>
      {examples.length > 0 && (
        <>
          <h2 className="first-title">Try one</h2>
          <ul className="examples">
            {examples.map((example) => (
              <ExampleCard key={example.title} example={example} />
            ))}
          </ul>
        </>
      )}
    </div>
  );
}

function ExampleCard({ example }: { example: Example }) {
  const page = usePage();
  const isReady = useView(isServing);
  const user = example.messages.findLast(({ role }) => role === "user")?.content ?? "";
  const system = example.messages.find(({ role }) => role === "system")?.content ?? "";
  const ask = () => {
    page.store.setState((state) => ({
      draft: { ...state.draft, user, system },
      probe: state.probes?.some(({ name }) => name === example.probe) ? (example.probe ?? null) : state.probe,
    }));
    void page.chat.send();
  };
  return (
    <li>
      <button type="button" className="example" disabled={!isReady} onClick={ask}>
        <span className="example-title">{example.title}</span>
        <span className="example-text">{user}</span>
        {example.probe != null && <span className="example-probe">{example.probe}</span>}
      </button>
    </li>
  );
}
