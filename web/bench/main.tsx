// Renders the real page over one run of 10,000 tokens and 64 probes, and exposes the changes to measure.
import { createRoot } from "react-dom/client";
import { adoptBuckets } from "../src/colour/sheet";
import type { ProbeInfo } from "../src/api/types";
import { noHistory } from "../src/state/history";
import { createPage, PageContext } from "../src/state/page";
import { NO_SAMPLING } from "../src/state/types";
import { App } from "../src/views/App";
import "uplot/dist/uPlot.min.css";
import "../src/style/index.css";

const NUM_TOKENS = 10_000;
const NUM_PROBES = 64;
const WORDS = [
  " the",
  " sky",
  " is",
  " blue",
  ",",
  " because",
  " light",
  " scatters",
  ".",
  "\n\n",
  " Why",
  "?",
];

const names = Array.from({ length: NUM_PROBES }, (_, i) => `probe_${i}`);
const probes = names.map((name, i): ProbeInfo => ({
  name,
  point: `post_block.${i % 30}`,
  activation: "sigmoid",
  threshold: 0.85,
  calibration: [0, 1],
  digest: "",
  description: null,
  auroc: null,
  histogram: null,
}));

/** Differs between tokens and probes, and is the same in every run. */
function scoreAt(token: number, probe: number): number {
  const wave = Math.sin(token * 0.013 * (probe + 1)) * Math.cos(token * 0.37 + probe);
  return 0.5 + 0.5 * wave;
}

adoptBuckets(document);
const page = createPage(noHistory(), document.baseURI);
const transcript = page.transcripts.get("bench");
let numTokens = 0;

function append(count: number): void {
  const tokens = Array.from({ length: count }, (_, i) => WORDS[(numTokens + i) % WORDS.length] ?? "");
  const token_ids = tokens.map((_, i) => numTokens + i);
  const scores = tokens.map((_, i) => names.map((__, probe) => scoreAt(numTokens + i, probe)));
  const where = { part: "answer", choice: 0, start: numTokens } as const;
  transcript.apply({ kind: "token", data: { ...where, token_ids, tokens, text: tokens.join("") } });
  transcript.apply({ kind: "probe_update", data: { ...where, names, scores, lost: null } });
  page.transcripts.notify("bench");
  numTokens += count;
}

/** Milliseconds from a frame's first callback until it is rendered: script, style, layout and paint. */
function frameCost(change: () => void, isInFrame: boolean): Promise<number> {
  return new Promise((resolve) => {
    let began = 0;
    const channel = new MessageChannel();
    channel.port1.onmessage = () => resolve(performance.now() - began);
    requestAnimationFrame(() => {
      began = performance.now();
      if (isInFrame) change();
      channel.port2.postMessage(null);
    });
    // Scheduled after the callback above, so that the page's own work runs after it.
    if (!isInFrame) change();
  });
}

async function repeated(times: number, change: (i: number) => void, isInFrame: boolean): Promise<number[]> {
  const costs: number[] = [];
  for (let i = 0; i < times; i += 1) costs.push(await frameCost(() => change(i), isInFrame));
  return costs;
}

append(NUM_TOKENS);
page.store.setState({
  connection: {
    kind: "answered",
    health: { status: "ready", reason: null, since: null, model: "bench", version: "0", replica: null },
  },
  model: "bench",
  probes,
  probe: "probe_0",
  lines: names.slice(0, 8),
  runs: {
    bench: {
      id: "bench",
      parent: null,
      createdAt: 0,
      serverRun: null,
      model: "bench",
      system: "",
      user: "A long run",
      steer: [],
      stop: [],
      sampling: NO_SAMPLING,
      probes,
      status: "streaming",
      error: null,
    },
  },
  head: "bench",
});
const root = document.getElementById("page");
if (root) {
  createRoot(root).render(
    <PageContext value={page}>
      <App />
    </PageContext>,
  );
}

export const bench = {
  isReady: () => document.querySelectorAll(".t").length >= NUM_TOKENS,
  append: (times: number) => repeated(times, () => append(1), false),
  switchProbe: (times: number) =>
    repeated(times, (i) => page.store.setState({ probe: `probe_${(i + 1) % NUM_PROBES}` }), true),
  hover: (times: number) =>
    repeated(
      times,
      (i) =>
        page.focus.setState({
          hover: { run: "bench", token: { part: "answer", index: numTokens - 200 + (i % 190) } },
        }),
      true,
    ),
  size: () => [numTokens, NUM_PROBES],
};
Object.assign(window, { bench });
