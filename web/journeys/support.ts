// What every journey uses: opens pages, fails on errors and policy violations, asks and exports.
import { mkdtempSync, readFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { chromium, type Browser, type BrowserContextOptions, type Page } from "playwright-core";
import type { RunFile } from "../src/data/runFile";
import { afterAll, afterEach, beforeAll, expect, inject } from "vitest";

/** The demo: a real engine behind the real proxy. */
export const DEMO = process.env.CLAIRAI_URL ?? "http://127.0.0.1:6969";
/** A proxy that needs a key and whose engine never starts. */
export const WAITING = process.env.CLAIRAI_WAITING_URL ?? "";
export const WAITING_KEY = process.env.CLAIRAI_WAITING_KEY ?? "";

export const PHONE: BrowserContextOptions = {
  viewport: { width: 390, height: 844 },
  hasTouch: true,
  isMobile: true,
  deviceScaleFactor: 2,
};

type Visit = (
  url: string,
  options?: BrowserContextOptions,
  before?: (page: Page) => Promise<unknown>,
) => Promise<Page>;

/** Call it once at the top of a file of journeys; the result opens a page. */
export function setUpPages(): Visit {
  let browser: Browser;
  const found: string[] = [];
  let close: (() => Promise<void>)[] = [];
  beforeAll(async () => {
    browser = await chromium.connect(inject("browser"));
  });
  afterEach(async () => {
    for (const each of close) await each();
    const problems = found.splice(0);
    close = [];
    expect(problems).toEqual([]);
  });
  afterAll(() => browser.close());
  return async (url, options = {}, before = () => Promise.resolve()) => {
    const context = await browser.newContext({
      viewport: { width: 1280, height: 800 },
      // The packaged Chromium's own is `en-US@posix`.
      locale: "en-US",
      permissions: ["clipboard-read", "clipboard-write"],
      ...options,
    });
    close.push(() => context.close());
    const page = await context.newPage();
    page.setDefaultTimeout(240_000);
    await noteProblems(page, found);
    await before(page);
    await page.goto(url);
    return page;
  };
}

/** Collect errors and policy violations as they happen. */
export async function noteProblems(page: Page, found: string[]): Promise<void> {
  await page.exposeFunction("reportProblem", (text: string) => found.push(text));
  await page.addInitScript(reportViolations);
  page.on("pageerror", (error) => found.push(`error: ${error.message}`));
  page.on("console", (message) => {
    const text = message.text();
    if (message.type() === "error" && !isExpected(text)) found.push(`console: ${text}`);
  });
}

/** Runs in the page, whose policy must never be violated. */
function reportViolations(): void {
  document.addEventListener("securitypolicyviolation", (event) => {
    const page = window as unknown as { reportProblem(text: string): void };
    page.reportProblem(`policy: ${event.violatedDirective} ${event.blockedURI} ${event.sample}`);
  });
}

/** The browser logs every failed response; journeys check those themselves. */
function isExpected(text: string): boolean {
  return text.startsWith("Failed to load resource");
}

export async function ready(page: Page): Promise<void> {
  await page.locator(".example:enabled").first().waitFor();
}

/** Fill in settings, such as those that make an answer short and reproducible. */
export async function settle(page: Page, settings: Record<string, string>): Promise<void> {
  await page.getByRole("button", { name: /^Settings/ }).click();
  for (const [label, value] of Object.entries(settings)) {
    await page.getByLabel(label, { exact: true }).fill(value);
  }
  await page.getByRole("button", { name: "Close settings" }).click();
}

export async function ask(page: Page, text: string): Promise<void> {
  await page.getByLabel("Message").fill(text);
  await page.keyboard.press("Enter");
}

/** Wait for the newest answer to end. */
export async function answered(page: Page): Promise<void> {
  await page
    .locator(".turn")
    .last()
    .getByRole("button", { name: "Regenerate" })
    .waitFor({ timeout: 600_000 });
}

/** Choose an entry of the export menu; returns the path of the saved file. */
export async function exported(page: Page, entry: RegExp): Promise<string> {
  const download = page.waitForEvent("download");
  await page.getByRole("button", { name: "Export" }).click();
  await page.locator(".menu").getByRole("button", { name: entry }).click();
  const saved = await download;
  const path = join(mkdtempSync(join(tmpdir(), "clairai-")), saved.suggestedFilename());
  await saved.saveAs(path);
  return path;
}

export async function exportedJson(page: Page): Promise<RunFile> {
  return JSON.parse(readFileSync(await exported(page, /^JSON/), "utf8")) as RunFile;
}

/** Choose an entry of the copy menu; returns the clipboard's content. */
export async function copied(page: Page, entry: string): Promise<string> {
  await page.evaluate(() => navigator.clipboard.writeText(""));
  await page.getByRole("button", { name: "Copy", exact: true }).click();
  await page.locator(".menu").getByRole("button", { name: entry }).click();
  await page.getByText("Copied").waitFor();
  // The word may still be there from an earlier copy.
  await expect.poll(() => page.evaluate(() => navigator.clipboard.readText())).not.toBe("");
  return page.evaluate(() => navigator.clipboard.readText());
}
