// Writes runs into one HTML file that shows them without a server.
import type { RunFile } from "../data/runFile";

/** What a saved page shows when it is opened: one run, or two compared, and how. */
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

/** `scriptSource` is the policy's word for the script: its hash where the browser can make one. */
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

/** Model output is in here: no character of it can end the element. */
export function embedded(value: unknown): string {
  return JSON.stringify(value)
    .replaceAll("<", "\\u003c")
    .replaceAll("\u2028", "\\u2028")
    .replaceAll("\u2029", "\\u2029");
}

/** The script's own text may hold what would end or nest the element; only strings do. */
export function closable(script: string): string {
  return script.replace(/<(\/script|script|!--)/gi, (whole) => `\\x3c${whole.slice(1)}`);
}

function escaped(text: string): string {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");
}
