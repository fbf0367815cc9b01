// Finds a headless Chromium that starts here: the one named by CHROMIUM, else the packaged one.
import { mkdirSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

// Its own folder: unpacked into the shared temporary folder, a stranger's file could be taken for it.
const FOLDER = fileURLToPath(new URL("../node_modules/.cache/chromium/", import.meta.url));
const FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--font-render-hinting=none"];
// The package changes the environment when it is imported.
const PLAIN = { ...process.env };

/** The path of the packaged Chromium, unpacked once. */
async function unpacked() {
  mkdirSync(FOLDER, { recursive: true });
  // It unpacks where TMPDIR says, and its libraries only where it believes to be in a Lambda.
  Object.assign(process.env, { TMPDIR: FOLDER, AWS_LAMBDA_JS_RUNTIME: "nodejs22.x" });
  try {
    const { default: packaged } = await import("@sparticuz/chromium");
    return await packaged.executablePath();
  } finally {
    process.env = { ...PLAIN };
  }
}

/** Playwright's options for a browser that starts here; an error if none does. */
export async function launchOptions(flags = []) {
  const args = [...FLAGS, ...flags];
  const executablePath = PLAIN.CHROMIUM ?? (await unpacked());
  // The system's own libraries first; where some are missing, those that the package brings.
  const brought = { LD_LIBRARY_PATH: `${FOLDER}al2023/lib`, FONTCONFIG_PATH: `${FOLDER}fonts` };
  const choices = [PLAIN, { ...PLAIN, ...brought }].map((env) => ({ executablePath, args, env }));
  const tried = await Promise.allSettled(choices.map(starts));
  const good = choices.find((_, i) => tried[i].status === "fulfilled");
  if (good) return good;
  throw tried[0].reason;
}

async function starts(options) {
  const browser = await chromium.launch(options);
  await browser.close();
}
