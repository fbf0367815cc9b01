import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import type { Page } from "playwright-core";
import { describe, expect, it } from "vitest";
import { answered, ask, copied, DEMO, exported, exportedJson, ready, settle, setUpPages } from "./support";

const visit = setUpPages();
const PYTHON = process.env.CLAIRAI_PYTHON ?? "python3";

async function withAnswer(): Promise<Page> {
  const page = await visit(DEMO);
  await ready(page);
  await settle(page, { "Max tokens": "10", Temperature: "0" });
  await ask(page, "It's <b>bold</b>, isn't it?");
  await answered(page);
  return page;
}

describe("sharing a run", () => {
  it("as curl and as Python gives programs that ask the same question", async () => {
    const page = await withAnswer();
    const file = await exportedJson(page);
    const curl = execFileSync("bash", ["-c", await copied(page, "curl")], {
      encoding: "utf8",
      stdio: ["ignore", "pipe", "ignore"],
    });
    expect(curl).toContain("probe_scores");
    const said = [...curl.matchAll(/"delta":\{[^}]*"content":("(?:[^"\\]|\\.)*")/g)].map(
      ([, text]) => JSON.parse(text ?? '""') as string,
    );
    expect(said.join("")).toBe(file.text);
    const python = execFileSync(PYTHON, ["-c", await copied(page, "Python")], { encoding: "utf8" });
    expect(python).toContain("negative_sentiment");
  });

  it("as a link opens the same view, and in another browser fills in the question", async () => {
    const page = await withAnswer();
    await page.locator(".answer .t").nth(4).click();
    const link = await copied(page, "Link to this view");
    const same = await page.context().newPage();
    await same.goto(link);
    await same.locator(".t[data-pin]").waitFor();
    expect(await same.locator(".question").textContent()).toContain("It's <b>bold</b>, isn't it?");
    const other = await visit(link);
    await ready(other);
    await other.locator(".banner", { hasText: "kept in another browser" }).waitFor();
    await expect.poll(() => other.getByLabel("Message").inputValue()).toBe("It's <b>bold</b>, isn't it?");
    expect(await other.locator(".turn").count()).toBe(0);
  });

  it("as CSV has a line for every token and the scores of the run", async () => {
    const page = await withAnswer();
    const file = await exportedJson(page);
    const lines = readFileSync(await exported(page, /^CSV/), "utf8")
      .trimEnd()
      .split("\r\n");
    expect(lines).toHaveLength(1 + file.prompt.tokens.length + file.answer.tokens.length);
    expect(lines[0]).toBe(["part", "index", "token_id", "token", ...file.names].join(","));
    const first = lines[1 + file.prompt.tokens.length]?.split(",").slice(-file.names.length).map(Number);
    expect(first).toEqual(file.answer.scores[0]);
  });

  it("as a picture gives a PNG of the expected width", async () => {
    const page = await withAnswer();
    const bytes = readFileSync(await exported(page, /^PNG/));
    expect(bytes.subarray(1, 4).toString()).toBe("PNG");
    expect(bytes.readUInt32BE(16)).toBe(2400);
    expect(bytes.readUInt32BE(20)).toBeGreaterThan(400);
    expect(bytes.length).toBeGreaterThan(20_000);
  });

  it("as a page opens from disk without a server and works like the live one", async () => {
    const page = await withAnswer();
    await page.getByLabel("Coloured by").selectOption("maths");
    const path = await exported(page, /^HTML/);
    const asked: string[] = [];
    const saved = await visit(pathToFileURL(path).href, { offline: true }, (made) => {
      made.on("request", (request) => {
        if (!/^(file|data|blob):/.test(request.url())) asked.push(request.url());
      });
      return Promise.resolve();
    });
    await saved.locator(".answer .t").nth(9).waitFor();
    expect(await saved.locator(".answer .t").allTextContents()).toEqual(
      await page.locator(".answer .t").allTextContents(),
    );
    await saved.locator(".answer .t").nth(2).hover();
    await saved.locator(".tip").waitFor();
    await expect.poll(() => saved.getByLabel("Coloured by").inputValue()).toBe("maths");
    await saved.getByLabel("Coloured by").selectOption("french");
    expect(await saved.getByLabel("Message").count()).toBe(0);
    expect(await saved.evaluate(() => document.fonts.check('16px "IBM Plex Sans Variable"'))).toBe(true);
    expect(asked).toEqual([]);
  });
});
