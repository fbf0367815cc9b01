// Opens the dashboard at URL, asks one of its example prompts and saves a screenshot per frame:
//   node scripts/record.mjs URL FOLDER
import { chromium } from "playwright-core";
import { launchOptions } from "./browser.mjs";

const [url, folder] = process.argv.slice(2);
const FRAMES = 130;
const EVERY_MS = 250;

const browser = await chromium.launch(await launchOptions());
const page = await browser.newPage({ viewport: { width: 1120, height: 700 }, locale: "en-US" });
await page.goto(url);
const example = page.locator(".example", { has: page.locator(".example-probe", { hasText: /^code$/ }) });
await example.first().waitFor({ timeout: 60_000 });
let frame = 0;
const shoot = () => page.screenshot({ path: `${folder}/${String(frame++).padStart(3, "0")}.png` });
await shoot();
await example.first().click();
while (frame < FRAMES) {
  const next = Date.now() + EVERY_MS;
  await shoot();
  await page.waitForTimeout(Math.max(0, next - Date.now()));
  if (frame > 20 && (await page.getByRole("button", { name: "Ask" }).count()) > 0) break;
}
for (let i = 0; i < 4; i++) await shoot();
await browser.close();
