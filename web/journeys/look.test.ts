import type { Page } from "playwright-core";
import { describe, expect, it } from "vitest";
import { answered, ask, DEMO, ready, settle, setUpPages } from "./support";

const visit = setUpPages();

async function withAnswer(): Promise<Page> {
  const page = await visit(DEMO);
  await ready(page);
  await settle(page, { "Max tokens": "24", Temperature: "0" });
  await ask(page, "Write a loop in C.");
  await answered(page);
  return page;
}

const pinned = (page: Page) => page.locator(".t[data-pin]");
const hovered = (page: Page) => page.locator(".t[data-hover]");

async function coloured(page: Page, canvas: string): Promise<number> {
  return page.locator(canvas).evaluate((element) => {
    const { width, height } = element as HTMLCanvasElement;
    const data =
      (element as HTMLCanvasElement).getContext("2d")?.getImageData(0, 0, width, height).data ?? [];
    const seen = new Set<number>();
    for (let i = 0; i < data.length; i += 4) {
      if (data[i + 3] === 255)
        seen.add(((data[i] ?? 0) << 16) | ((data[i + 1] ?? 0) << 8) | (data[i + 2] ?? 0));
    }
    return seen.size;
  });
}

describe("looking at a run", () => {
  it("draws lines and matrix, and marks the hovered token in all views", async () => {
    const page = await withAnswer();
    await expect.poll(() => coloured(page, ".lines canvas")).toBeGreaterThan(5);
    await expect.poll(() => coloured(page, ".cells canvas")).toBeGreaterThan(20);
    await page.locator(".answer .t").nth(5).hover();
    await page.locator(".tip").waitFor();
    expect(await page.locator(".tip .score-rows li").count()).toBe(await page.locator(".probe").count());
    expect(await page.locator(".tip .faint").first().textContent()).toMatch(/^answer 5, id \d+$/);
    const cursor = page.locator(".cells-cursor");
    await expect.poll(() => cursor.boundingBox()).not.toBeNull();
    const before = await cursor.boundingBox();
    const matrix = (await page.locator(".cells canvas").boundingBox()) ?? { x: 0, y: 0, width: 0, height: 0 };
    await page.mouse.move(matrix.x + matrix.width - 20, matrix.y + 8);
    await expect.poll(async () => (await cursor.boundingBox())?.x).not.toBe(before?.x);
    await expect.poll(() => hovered(page).count()).toBe(1);
    const lines = (await page.locator(".lines .u-over").boundingBox()) ?? { x: 0, y: 0, width: 0, height: 0 };
    await page.mouse.move(lines.x + lines.width * 0.9, lines.y + 30);
    await page.locator(".tip").waitFor();
    await expect.poll(() => hovered(page).count()).toBe(1);
    await page.mouse.move(5, 400);
    await expect.poll(() => page.locator(".tip").count()).toBe(0);
  });

  it("pins by click, moves by keys, and unpins", async () => {
    const page = await withAnswer();
    await page.locator(".answer .t").nth(3).click();
    await page.mouse.move(5, 400);
    await expect.poll(() => pinned(page).count()).toBe(1);
    await expect.poll(() => page.url()).toContain("at=a3");
    await page.keyboard.press("ArrowRight");
    await expect.poll(() => page.url()).toContain("at=a4");
    await page.keyboard.press("Shift+ArrowRight");
    await expect.poll(() => page.url()).toContain("at=a14");
    await page.keyboard.press("Home");
    await expect.poll(() => page.url()).toContain("at=p0");
    await expect.poll(() => pinned(page).textContent()).toBe("<|im_start|>");
    await expect.poll(() => page.getByRole("button", { name: "Only my words" }).count()).toBe(1);
    await page.keyboard.press("End");
    await page.locator(".tip-why", { hasText: "The last token is never read by the model" }).waitFor();
    await page.keyboard.press("Escape");
    await expect.poll(() => pinned(page).count()).toBe(0);
    await expect.poll(() => page.url()).not.toContain("at=");
  });

  it("lists crossings, and jumps to the token of one", async () => {
    const page = await withAnswer();
    const entry = page.locator(".log li").first();
    await entry.waitFor();
    const probe = (await entry.locator(".log-probe").textContent()) ?? "";
    await entry.locator("button").click();
    await pinned(page).first().waitFor();
    await expect.poll(() => page.getByLabel("Coloured by").inputValue()).toBe(probe);
    await expect.poll(() => pinned(page).getAttribute("class")).toContain("over");
  });

  it("chooses probes by search, by key and from the tooltip, and changes the colours", async () => {
    const page = await withAnswer();
    await page.keyboard.press("Escape");
    await page.locator("h1").click();
    await page.keyboard.press("/");
    await page.keyboard.type("fren");
    await expect.poll(() => page.locator(".probe").count()).toBe(1);
    await page.getByRole("radio", { name: /french/ }).check();
    await expect.poll(() => page.getByLabel("Coloured by").inputValue()).toBe("french");
    const french = await page.locator(".answer .t").nth(2).getAttribute("class");
    await page.getByLabel("Search probes").fill("");
    await page.locator("h1").click();
    await page.keyboard.press("P");
    await expect.poll(() => page.getByLabel("Coloured by").inputValue()).not.toBe("french");
    await page.getByLabel("Coloured by").selectOption("code");
    await expect.poll(() => page.locator(".answer .t").nth(2).getAttribute("class")).not.toBe(french);
    await expect.poll(() => page.url()).toContain("probe=code");
    await page.getByRole("checkbox", { name: "french in the chart" }).uncheck();
    const probes = await page.locator(".probe").count();
    await expect.poll(() => page.locator(".keys li").count()).toBe(probes - 1);
  });

  it("compares two runs with one marked token, and restores the view from its address", async () => {
    const page = await withAnswer();
    await settle(page, { Temperature: "1", Seed: "5" });
    await page.getByRole("button", { name: "Regenerate" }).click();
    await page.locator(".variants").waitFor();
    await answered(page);
    await page.locator(".variants").getByRole("button", { name: "Compare" }).click();
    await expect.poll(() => page.locator(".side").count()).toBe(2);
    await page.locator(".side").first().locator(".tokens").last().locator(".t").nth(2).hover();
    await expect.poll(() => hovered(page).count()).toBe(2);
    await expect.poll(() => page.locator(".tip .pair").count()).toBeGreaterThan(1);
    await page.locator(".side").nth(1).locator(".tokens").last().locator(".t").nth(4).click();
    await expect.poll(() => pinned(page).count()).toBe(2);
    await expect.poll(() => coloured(page, ".compare-both .cells canvas")).toBeGreaterThan(5);
    await expect.poll(() => page.url()).toMatch(/vs=/);
    await page.reload();
    await page.locator(".side").nth(1).locator(".t").first().waitFor();
    expect(await page.locator(".side").count()).toBe(2);
    await expect.poll(() => page.url().split("#")[1]).toContain("vs=");
  });

  it("shows white space, and Markdown when asked to", async () => {
    const page = await withAnswer();
    expect(await page.locator(".answer .t.newline").count()).toBeGreaterThan(0);
    await page.getByRole("button", { name: "View" }).click();
    await page.getByLabel("White-space marks").check();
    const lead = page.locator(".answer .t[data-lead]").first();
    const mark = () => lead.evaluate((span) => getComputedStyle(span, "::before").content);
    await expect.poll(mark).toMatch(/^"[·→]+"/);
    await page.getByLabel("Answers as Markdown").check();
    await page.locator(".answer .markdown").waitFor();
    await expect.poll(() => page.locator(".answer .t").count()).toBe(0);
  });

  it("zooms chart and matrix by keys and by dragging", async () => {
    const page = await withAnswer();
    await page.locator("h1").click();
    await page.keyboard.press("+");
    await page.getByRole("button", { name: "All tokens" }).click();
    await expect.poll(() => page.getByRole("button", { name: "All tokens" }).count()).toBe(0);
    const box = (await page.locator(".lines .u-over").boundingBox()) ?? { x: 0, y: 0, width: 0, height: 0 };
    await page.mouse.move(box.x + 20, box.y + 50);
    await page.mouse.down();
    await page.mouse.move(box.x + box.width / 2, box.y + 50, { steps: 4 });
    await page.mouse.up();
    await page.getByRole("button", { name: "All tokens" }).waitFor();
  });
});
