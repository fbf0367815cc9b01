// Finds a headless Chromium that starts here: the one named by CHROMIUM, else the packaged one.
import { mkdirSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

// Not the shared temporary folder, where another user could have planted a file of the same name.
const FOLDER = fileURLToPath(new URL("../node_modules/.cache/chromium/", import.meta.url));
const FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--font-render-hinting=none"];
// A copy, because the package changes the environment when it is imported.
const PLAIN = { ...process.env };

/** Unpacks the packaged Chromium once, and returns its path. */
async function unpacked() {
  mkdirSync(FOLDER, { recursive: true });
  // It unpacks into TMPDIR, and unpacks its libraries only in what looks like AWS Lambda.
  Object.assign(process.env, { TMPDIR: FOLDER, AWS_LAMBDA_JS_RUNTIME: "nodejs22.x" });
  try {
    const { default: packaged } = await import("@sparticuz/chromium");
    return await packaged.executablePath();
  } finally {
    process.env = { ...PLAIN };
  }
}

/** Playwright's launch options for a browser that starts here; throws if none does. */
export async function launchOptions(flags = []) {
  const args = [...FLAGS, ...flags];
  const executablePath = PLAIN.CHROMIUM ?? (await unpacked());
  // Try the system's libraries first, then those of the package.
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
