import { chromium } from "playwright-core";
import { expect, inject, it } from "vitest";
import { faults } from "./axe";
import { DEMO, noteProblems, ready } from "./support";

it("the checks of the journeys detect violations of policy and accessibility, and errors", async () => {
  const browser = await chromium.connect(inject("browser"));
  const page = await browser.newPage({ locale: "en-US" });
  const found: string[] = [];
  try {
    await noteProblems(page, found);
    await page.goto(DEMO);
    await ready(page);
    expect([found, await faults(page)]).toEqual([[], []]);
    await page.evaluate(() => {
      document.body.setAttribute("style", "color: red");
      document.body.append(document.createElement("img"));
      setTimeout(() => {
        throw new Error("planted");
      });
    });
    await expect.poll(() => found.join("\n")).toMatch(/policy: style-src/);
    await expect.poll(() => found.join("\n")).toMatch(/error: planted/);
    expect((await faults(page)).join("\n")).toContain("image-alt");
  } finally {
    await browser.close();
  }
});
