// The menu that copies the shown request as Python or curl, or a link to this view.
import { useState } from "react";
import { addressOf, type Question } from "../../state/address";
import type { Page } from "../../state/page";
import { usePage } from "../../state/page";
import { bodyOf, messagesOf, type CompletionBody } from "../../state/request";
import { pathTo } from "../../state/store";
import type { Run } from "../../state/types";
import { copyText } from "../../state/clipboard";
import { curl, python } from "../../export/snippets";
import { Menu, MenuItem } from "./Menu";

export function CopyMenu() {
  const page = usePage();
  const [done, setDone] = useState<string | null>(null);
  const copy = async (name: string, text: string) => {
    try {
      await copyText(text);
      setDone(name);
      setTimeout(() => setDone(null), 1500);
    } catch (error) {
      page.store.setState({ notice: String(error instanceof Error ? error.message : error) });
    }
  };
  const choices: readonly (readonly [string, () => string])[] = [
    ["Python", () => python(requestOf(page), location.origin, page.hasKey())],
    ["curl", () => curl(requestOf(page), location.origin, page.hasKey())],
    ["Link to this view", () => linkOf(page)],
  ];
  return (
    <Menu title={done === null ? "Copy" : "Copied"} label="Copy">
      {choices.map(([name, make]) => (
        <MenuItem key={name} onChoose={() => void copy(name, make())}>
          {name}
        </MenuItem>
      ))}
    </Menu>
  );
}

function requestOf(page: Page): CompletionBody {
  const { runs, head } = page.store.getState();
  const path = pathTo(runs, head);
  const run = path.at(-1);
  if (!run) throw new Error("no run is shown");
  const answers = path.slice(0, -1).map(({ id }) => page.transcripts.get(id).text);
  return bodyOf(run, messagesOf(path, answers));
}

function questionIn({ user, system, sampling, steer, stop }: Run): Question {
  return { user, system, sampling, steer, stop };
}

/** The link includes the question, so that a browser without this run can ask it again. */
function linkOf(page: Page): string {
  const state = page.store.getState();
  const { pin } = page.focus.getState();
  const run = state.head === null ? undefined : state.runs[state.head];
  const question = run ? questionIn(run) : null;
  const at = pin !== null && pin.run === state.head ? pin.token : null;
  return location.origin + location.pathname + addressOf(state, at, question);
}
