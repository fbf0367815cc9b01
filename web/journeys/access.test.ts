import type { Page } from "playwright-core";
import { describe, expect, it } from "vitest";
import { faults } from "./axe";
import { answered, ask, DEMO, PHONE, ready, settle, WAITING, setUpPages } from "./support";

const visit = setUpPages();
async function withAnswer(page: Page): Promise<void> {
  await ready(page);
  await settle(page, { "Max tokens": "16", Temperature: "0" });
  await ask(page, "Write a loop in C.");
  await answered(page);
}

describe.each(["light", "dark"] as const)("in the %s theme axe finds nothing wrong", (colorScheme) => {
  it("on the first screen, and with the settings open", async () => {
    const page = await visit(DEMO, { colorScheme });
    await ready(page);
    expect(await faults(page)).toEqual([]);
    await page.getByRole("button", { name: /^Settings/ }).click();
    expect(await faults(page)).toEqual([]);
  });

  it("on a run, its tooltip, its history, its menus, the help and a comparison", async () => {
    const page = await visit(DEMO, { colorScheme });
    await withAnswer(page);
    expect(await faults(page)).toEqual([]);
    await page.locator(".answer .t").nth(2).click();
    await page.locator(".tip").waitFor();
    expect(await faults(page)).toEqual([]);
    await page.keyboard.press("Escape");
    for (const menu of ["Export", "Copy", "View"]) {
      await page.getByRole("button", { name: menu, exact: true }).click();
      expect(await faults(page, ".bar")).toEqual([]);
      await page.keyboard.press("Escape");
    }
    await page.getByRole("button", { name: "View" }).click();
    await page.getByRole("button", { name: "Keyboard" }).click();
    await page.getByRole("dialog").waitFor();
    expect(await faults(page)).toEqual([]);
    await page.keyboard.press("Escape");
    await page.getByRole("tab", { name: "History" }).click();
    expect(await faults(page)).toEqual([]);
    await page.getByRole("button", { name: "Regenerate" }).click();
    await page.locator(".variants").waitFor();
    await answered(page);
    await page.locator(".variants").getByRole("button", { name: "Compare" }).click();
    await page.locator(".side").nth(1).waitFor();
    expect(await faults(page)).toEqual([]);
  });

  it("on a phone, in every part, and nothing is wider than the screen", async () => {
    const page = await visit(DEMO, { ...PHONE, colorScheme });
    await withAnswer(page);
    for (const part of ["Chat", "Charts", "Crossings", "Probes", "History"]) {
      await page.locator(".tabs").getByRole("button", { name: part }).click();
      expect(await faults(page), part).toEqual([]);
      expect(await page.evaluate(() => document.documentElement.scrollWidth), part).toBeLessThanOrEqual(390);
    }
    await page.locator(".tabs").getByRole("button", { name: "Chat" }).click();
    await page.locator(".answer .t").nth(2).tap();
    const tip = await page.locator(".tip").boundingBox();
    expect(tip && tip.x >= 0 && tip.x + tip.width <= 390).toBe(true);
    expect(await faults(page)).toEqual([]);
  });

  it("while the engine starts, and when a key is needed", async () => {
    const page = await visit(WAITING, { colorScheme });
    await page.locator(".banner").waitFor();
    expect(await faults(page)).toEqual([]);
    await page.route("**/health", (route) =>
      route.fulfill({ json: { status: "ready", reason: null, model: "m", version: "0" } }),
    );
    await page.getByRole("dialog", { name: "API key" }).waitFor();
    expect(await faults(page)).toEqual([]);
  });
});

describe("without a mouse", () => {
  it("the user can ask, look, pin, choose and compare", async () => {
    const page = await visit(DEMO);
    await ready(page);
    await settle(page, { "Max tokens": "12", Temperature: "0" });
    await page.locator("h1").click();
    await page.keyboard.press("m");
    await page.keyboard.type("Write a loop in C.");
    await page.keyboard.press("Enter");
    await answered(page);
    await tabTo(page, "Answer, token by token");
    await page.keyboard.press("ArrowRight");
    await page.keyboard.press("ArrowRight");
    await page.locator(".tip").waitFor();
    const said = page.locator("[aria-live=polite]").first();
    await expect.poll(() => said.textContent()).toMatch(/^(prompt|answer) token 2: /);
    await page.keyboard.press("p");
    await page.keyboard.press("n");
    await tabTo(page, "Regenerate");
    await page.keyboard.press("Enter");
    await page.locator(".variants").waitFor();
    await answered(page);
    await tabTo(page, "Compare");
    await page.keyboard.press("Enter");
    await page.locator(".side").nth(1).waitFor();
  });
});

/** Press Tab until the element of this name has the focus. */
async function tabTo(page: Page, name: string): Promise<void> {
  for (let i = 0; i < 120; i += 1) {
    await page.keyboard.press("Tab");
    const found = await page.evaluate(() => {
      const element = document.activeElement;
      return element?.getAttribute("aria-label") ?? element?.textContent ?? "";
    });
    if (found === name) return;
  }
  throw new Error(`Tab does not reach ${name}`);
}
