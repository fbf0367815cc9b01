// The menu that exports the shown runs as JSON, CSV, PNG or HTML.
import { ownParts, scriptSource } from "../../export/bundle";
import { csv } from "../../export/csv";
import { figure } from "../../export/figure";
import { html } from "../../export/html";
import { fileName, save } from "../../export/save";
import { toFile, type RunFile } from "../../data/runFile";
import type { Theme } from "../../colour/ramp";
import type { Page } from "../../state/page";
import { usePage } from "../../state/page";
import type { Run } from "../../state/types";
import { ordered } from "../sidebar/probeGroups";
import { probeIn, useTheme } from "../hooks";
import { Menu, MenuItem } from "./Menu";

type Saver = (page: Page, run: Run, theme: Theme) => Promise<void> | void;

const CHOICES: readonly (readonly [string, Saver])[] = [
  ["JSON: everything", saveJson],
  ["CSV: one line per token", saveCsv],
  ["PNG: a picture", savePng],
  ["HTML: this view, without a server", saveHtml],
];

export function ExportMenu() {
  const page = usePage();
  const theme = useTheme();
  const choose = async (saver: Saver) => {
    const { runs, head } = page.store.getState();
    const run = head === null ? undefined : runs[head];
    if (!run) return;
    try {
      await saver(page, run, theme);
    } catch (error) {
      page.store.setState({ notice: error instanceof Error ? error.message : String(error) });
    }
  };
  return (
    <Menu title="Export">
      {CHOICES.map(([name, saver]) => (
        <MenuItem key={name} onChoose={() => void choose(saver)}>
          {name}
        </MenuItem>
      ))}
    </Menu>
  );
}

function filesOf(page: Page, run: Run): RunFile[] {
  const { runs, versus } = page.store.getState();
  const other = versus === null ? undefined : runs[versus];
  return [run, ...(other ? [other] : [])].map((each) => toFile(each, page.transcripts.get(each.id)));
}

function saveJson(page: Page, run: Run): void {
  const files = filesOf(page, run);
  const text = JSON.stringify(files.length === 1 ? files[0] : files, null, 1);
  save(fileName(run.user, "json"), new Blob([text], { type: "application/json" }));
}

function saveCsv(page: Page, run: Run): void {
  for (const file of filesOf(page, run)) {
    save(fileName(file.run.user, "csv"), new Blob([csv(file)], { type: "text/csv" }));
  }
}

async function savePng(page: Page, run: Run, theme: Theme): Promise<void> {
  const { probes, probe: name } = page.store.getState();
  const probe = probeIn(run, probes, name);
  if (!probe) throw new Error("Choose a probe first: the picture is coloured by it.");
  const canvas = figure(run, page.transcripts.get(run.id), probe, ordered(run.probes), theme);
  const blob = await new Promise<Blob | null>((resolve) => canvas.toBlob(resolve, "image/png"));
  if (!blob) throw new Error("The picture is too large for this browser.");
  save(fileName(run.user, "png"), blob);
}

async function saveHtml(page: Page, run: Run): Promise<void> {
  const parts = await ownParts(document);
  const source = await scriptSource(parts.script);
  const { probe, lines } = page.store.getState();
  const saved = { runs: filesOf(page, run), probe, lines };
  const text = html(saved, parts, source, `clairai: ${run.user.slice(0, 60)}`);
  save(fileName(run.user, "html"), new Blob([text], { type: "text/html" }));
}
