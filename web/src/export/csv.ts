// Writes a run as CSV: one line per token, one column per probe.
import type { PartFile, RunFile } from "../data/runFile";

/** Token texts are written as JSON: exact, on one line, and never a formula to a spreadsheet. */
export function csv(file: RunFile): string {
  const head = ["part", "index", "token_id", "token", ...file.names].map(cell).join(",");
  const lines = [
    ...rows("prompt", file.prompt, file.names.length),
    ...rows("answer", file.answer, file.names.length),
  ];
  return `${[head, ...lines].join("\r\n")}\r\n`;
}

function rows(part: string, file: PartFile, width: number): string[] {
  return file.tokens.map((token, index) => {
    const scores = file.scores[index] ?? new Array<null>(width).fill(null);
    const fixed = [part, index, file.token_ids[index] ?? "", JSON.stringify(token)];
    return [...fixed, ...scores.map((value) => value ?? "")].map((value) => cell(String(value))).join(",");
  });
}

function cell(text: string): string {
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
