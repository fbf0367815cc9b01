// Writes runs into one HTML file that shows them without a server.
import type { RunFile } from "../data/runFile";

/** What a saved page shows: one run or two compared ones, the chosen probe and the chart's lines. */
export interface Saved {
  runs: RunFile[];
  probe: string | null;
  lines: string[];
}

export const SAVED_ID = "saved-runs";

export interface Parts {
  script: string;
  style: string;
}

/** `scriptSource` allows the script in the policy: by its hash if the browser can compute one. */
export function html(saved: Saved, parts: Parts, scriptSource: string, title: string): string {
  const policy = [
    "default-src 'none'",
    `script-src ${scriptSource}`,
    "style-src 'unsafe-inline'",
    "img-src data: blob:",
    "font-src data:",
    "base-uri 'none'",
    "form-action 'none'",
  ].join("; ");
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="${policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>${escaped(title)}</title>
<style>${parts.style.replaceAll("</", "<\\/")}</style>
</head>
<body>
<div id="page"></div>
<script type="application/json" id="${SAVED_ID}">${embedded(saved)}</script>
<script type="module">${closable(parts.script)}</script>
</body>
</html>
`;
}

/** Escapes model output so that it cannot end the script element. */
export function embedded(value: unknown): string {
  return JSON.stringify(value)
    .replaceAll("<", "\\u003c")
    .replaceAll("\u2028", "\\u2028")
    .replaceAll("\u2029", "\\u2029");
}

/** Escapes what would end or nest the script element; in the bundle it occurs in strings only. */
export function closable(script: string): string {
  return script.replace(/<(\/script|script|!--)/gi, (whole) => `\\x3c${whole.slice(1)}`);
}

function escaped(text: string): string {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");
}
