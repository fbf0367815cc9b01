// The bar at the top: the model, the engine's status, and the menus.
import { useState } from "react";
import { usePage } from "../../state/page";
import { siblings } from "../../state/store";
import type { ThemeChoice } from "../../state/types";
import { useView } from "../hooks";
import { Help } from "../Help";
import { CopyMenu } from "./CopyMenu";
import { ExportMenu } from "./ExportMenu";
import { Menu, MenuItem } from "./Menu";
import { Status } from "./Status";

export function Bar() {
  const model = useView((state) => state.model);
  const hasRun = useView((state) => state.head !== null);
  const isFrozen = useView((state) => state.isFrozen);
  const [hasHelp, setHelp] = useState(false);
  return (
    <header className="bar">
      <h1 className="wordmark">clairai</h1>
      {model !== null && <span className="bar-model">{model}</span>}
      {isFrozen ? <span className="faint">saved run, no server</span> : <Status />}
      <span className="spring" />
      <CompareButton />
      {hasRun && !isFrozen && <CopyMenu />}
      {hasRun && !isFrozen && <ExportMenu />}
      <ViewMenu onHelp={() => setHelp(true)} />
      {hasHelp && <Help onClose={() => setHelp(false)} />}
    </header>
  );
}

function CompareButton() {
  const page = usePage();
  const versus = useView((state) => state.versus);
  const head = useView((state) => (state.head === null ? null : (state.runs[state.head] ?? null)));
  const numRuns = useView((state) => Object.keys(state.runs).length);
  if (head === null || numRuns < 2) return null;
  const begin = () => {
    const { runs } = page.store.getState();
    const other = siblings(runs, head)
      .filter(({ id }) => id !== head.id)
      .at(-1);
    if (other) page.store.setState({ versus: other.id, span: null });
    else
      page.store.setState({
        pane: "history",
        notice: "Choose a run in the history to compare with this one.",
      });
  };
  return versus === null ? (
    <button type="button" className="quiet" onClick={begin}>
      Compare
    </button>
  ) : (
    <button
      type="button"
      className="quiet"
      aria-pressed="true"
      onClick={() => page.store.setState({ versus: null, span: null })}
    >
      End comparison
    </button>
  );
}

const THEMES: readonly ThemeChoice[] = ["system", "light", "dark"];

function ViewMenu({ onHelp }: { onHelp: () => void }) {
  const page = usePage();
  const theme = useView((state) => state.theme);
  const hasMarkdown = useView((state) => state.hasMarkdown);
  const hasMarks = useView((state) => state.hasMarks);
  const hasMono = useView((state) => state.hasMono);
  return (
    <Menu title="View">
      <Check
        title="White-space marks"
        isOn={hasMarks}
        onChange={(on) => page.store.setState({ hasMarks: on })}
      />
      <Check
        title="Monospaced tokens"
        isOn={hasMono}
        onChange={(on) => page.store.setState({ hasMono: on })}
      />
      <Check
        title="Answers as Markdown"
        isOn={hasMarkdown}
        onChange={(on) => page.store.setState({ hasMarkdown: on })}
      />
      <fieldset className="choices">
        <legend>Theme</legend>
        {THEMES.map((choice) => (
          <label key={choice}>
            <input
              type="radio"
              name="theme"
              checked={theme === choice}
              onChange={() => page.store.setState({ theme: choice })}
            />
            {choice}
          </label>
        ))}
      </fieldset>
      <MenuItem onChoose={onHelp}>Keyboard shortcuts</MenuItem>
    </Menu>
  );
}

function Check({ title, isOn, onChange }: { title: string; isOn: boolean; onChange: (on: boolean) => void }) {
  return (
    <label className="menu-item">
      <input type="checkbox" checked={isOn} onChange={(event) => onChange(event.target.checked)} />
      {title}
    </label>
  );
}
