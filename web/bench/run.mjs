// Measures in headless Chromium what each change costs the page, and prints one line of JSON.
// Run in web/: node bench/run.mjs
import { createServer } from "node:http";
import { mkdtempSync, rmSync } from "node:fs";
import { readFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join, normalize } from "node:path";
import { chromium } from "playwright-core";
import { build } from "vite";
import { launchOptions } from "../scripts/browser.mjs";

const TIMES = 200;
const TYPES = { html: "text/html", js: "text/javascript", css: "text/css", woff2: "font/woff2" };

function served(folder) {
  const server = createServer((request, response) => {
    const path = normalize(request.url === "/" ? "index.html" : request.url.slice(1));
    readFile(join(folder, path)).then(
      (bytes) =>
        response.writeHead(200, { "Content-Type": TYPES[path.split(".").at(-1)] ?? "text/plain" }).end(bytes),
      () => response.writeHead(404).end(),
    );
  });
  return new Promise((resolve) => server.listen(0, "127.0.0.1", () => resolve(server)));
}

function summary(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const at = (part) =>
    Number(sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))].toFixed(1));
  return { p50: at(0.5), p95: at(0.95), max: at(1) };
}

const folder = mkdtempSync(join(tmpdir(), "clairai-bench-"));
await build({
  configFile: "bench/vite.config.ts",
  logLevel: "error",
  build: { outDir: folder, emptyOutDir: true },
});
const server = await served(folder);
const browser = await chromium.launch(await launchOptions());
try {
  const page = await browser.newPage({ viewport: { width: 1280, height: 800 }, locale: "en-US" });
  const began = Date.now();
  await page.goto(`http://127.0.0.1:${server.address().port}/`);
  await page.waitForFunction("window.bench?.isReady()");
  const load_ms = Date.now() - began;
  const measure = async (name) => summary(await page.evaluate(`bench.${name}(${TIMES})`));
  await page.evaluate("bench.append(20)"); // warm up: code is compiled on its first run
  const [append_ms, hover_ms, switch_ms] = [
    await measure("append"),
    await measure("hover"),
    await measure("switchProbe"),
  ];
  const [tokens, probes] = await page.evaluate("bench.size()");
  const chromium_version = browser.version();
  process.stdout.write(
    `${JSON.stringify({ tokens, probes, times: TIMES, append_ms, switch_ms, hover_ms, load_ms, chromium_version })}\n`,
  );
} finally {
  await browser.close();
  server.close();
  rmSync(folder, { recursive: true });
}
