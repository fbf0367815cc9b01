import type { Page } from "playwright-core";
import { describe, expect, it } from "vitest";
import type { Tiers, VectorInfo, VectorList } from "../src/api/steering";
import type { CompletionBody } from "../src/state/request";
import { faults } from "./axe";
import { answered, ask, DEMO, exported, exportedJson, PHONE, ready, settle, setUpPages } from "./support";
import { pathToFileURL } from "node:url";

const visit = setUpPages();
const SHORT = { "Max tokens": "16", Temperature: "0" };
/** Multiple of the suggested scale that reliably changes a short answer. */
const STRONG = 3;

async function served(): Promise<VectorInfo> {
  const answer = await fetch(`${DEMO}/v1/steering/vectors`);
  const [first] = ((await answer.json()) as VectorList).data;
  if (!first) throw new Error("the demo has no vectors");
  return first;
}

/** Opens a page and chooses the demo's first vector. */
async function steered(): Promise<{ page: Page; vector: VectorInfo }> {
  const [vector, page] = [await served(), await visit(DEMO)];
  await ready(page);
  await settle(page, SHORT);
  await page.getByRole("tab", { name: "Steering" }).click();
  await page.getByRole("checkbox", { name: vector.name }).check();
  return { page, vector };
}

/** Ask with and without steering; returns both requests, the plain one first. */
async function askBoth(page: Page, text: string): Promise<CompletionBody[]> {
  const bodies: CompletionBody[] = [];
  page.on("request", (request) => {
    if (request.method() === "POST") bodies.push(request.postDataJSON() as CompletionBody);
  });
  await ask(page, text);
  await page.locator(".side").nth(1).waitFor();
  await page.getByRole("button", { name: "Ask both" }).waitFor();
  return bodies;
}

const side = (page: Page, name: "A" | "B") => page.getByRole("article", { name: `Run ${name}` });
const tokensOf = (page: Page, name: "A" | "B") =>
  side(page, name)
    .getByRole("group", { name: /^Answer/ })
    .locator(".t");

/** The steered side, and only it, shows the applied vector with its digest. */
async function proved(page: Page, vector: VectorInfo): Promise<void> {
  const said = side(page, "B").getByRole("list", { name: "Applied" });
  expect(await said.textContent()).toContain(`Applied ${vector.name} `);
  expect(await said.textContent()).toContain("in the answer");
  expect(await said.locator("code").textContent()).toBe(vector.digest.slice(0, 8));
  expect(await side(page, "A").locator(".applied").count()).toBe(0);
}

/** Both answers are equal without the marked tokens, in the exported file too. */
async function marked(page: Page): Promise<void> {
  const common = (name: "A" | "B") =>
    tokensOf(page, name).evaluateAll((all) =>
      all.filter((each) => !("differs" in each.dataset)).map((each) => each.textContent),
    );
  const b = await tokensOf(page, "B").allTextContents();
  expect(await tokensOf(page, "A").allTextContents()).not.toEqual(b);
  expect(await common("A")).toEqual(await common("B"));
  expect(await page.locator(".means").textContent()).toMatch(/B − A [+−\d]/);
  const saved = await visit(pathToFileURL(await exported(page, /^HTML/)).href, { offline: true });
  await saved.getByRole("list", { name: "Applied" }).waitFor();
  expect(await saved.locator(".side .t[data-differs]").count()).toBe(
    await page.locator(".side .t[data-differs]").count(),
  );
  await side(page, "B").getByRole("button", { name: "Continue with B" }).click();
  await expect.poll(() => page.locator(".answer .t").allTextContents()).toEqual(b);
}

describe("steering", () => {
  it("sends the request that it shows, and the same one without steering", async () => {
    const { page, vector } = await steered();
    await page.getByLabel(`Scale of ${vector.name}, as a number`).fill(String(STRONG * vector.scale));
    await page.getByLabel("When").selectOption("generation");
    await page.getByLabel("Message").fill("How was your day?");
    const shown = page.getByRole("group", { name: "The request as JSON" });
    await expect.poll(() => shown.innerText()).toContain("How was your day?");
    const preview = JSON.parse(await shown.innerText()) as CompletionBody;
    const [plain, sent] = await askBoth(page, "How was your day?");
    expect(sent).toEqual(preview);
    expect(sent?.clairai.steer).toEqual([
      { vector: vector.name, scale: STRONG * vector.scale, op: "add", when: "generation" },
    ]);
    const { steer, ...rest } = sent?.clairai ?? {};
    expect(plain).toEqual({ ...sent, clairai: rest });
    expect([steer?.length, sent?.seed]).toEqual([1, 1]);
    await proved(page, vector);
    await marked(page);
  });

  it("is not sent at scale 0, and the page says so", async () => {
    const { page, vector } = await steered();
    await page.getByLabel(`Scale of ${vector.name}, as a number`).fill("0");
    await page.getByText("off, not sent").waitFor();
    const request = page.waitForRequest((made) => made.method() === "POST");
    await ask(page, "How was your day?");
    expect(((await request).postDataJSON() as CompletionBody).clairai.steer).toBeUndefined();
    await answered(page);
  });

  it("shows the server's refusal beside the plain answer", async () => {
    const ghost = { ...(await served()), name: "ghost" };
    const page = await visit(DEMO, {}, (made) =>
      made.route("**/v1/steering/vectors", async (route) => {
        const answer = await route.fetch();
        const list = (await answer.json()) as VectorList;
        await route.fulfill({ json: { ...list, data: [ghost, ...list.data] } });
      }),
    );
    await ready(page);
    await settle(page, SHORT);
    await page.getByRole("tab", { name: "Steering" }).click();
    await page.getByRole("checkbox", { name: "ghost" }).check();
    await askBoth(page, "How was your day?");
    expect(await side(page, "B").getByRole("alert").textContent()).toMatch(/ghost/);
    expect(await side(page, "A").getByRole("alert").count()).toBe(0);
    expect(await tokensOf(page, "A").count()).toBeGreaterThan(3);
  });

  it("is not sent while a field is invalid, and the page names the field", async () => {
    const { page } = await steered();
    await page.getByLabel("Operation").selectOption("clamp");
    await page.getByText("A clamp needs a low or a high bound.").first().waitFor();
    await ask(page, "How was your day?");
    await page.locator(".banner", { hasText: "Not asked." }).waitFor();
    expect(await page.locator(".turn, .side").count()).toBe(0);
    expect(await page.getByLabel("Message").inputValue()).toBe("How was your day?");
  });

  it("that the engine does not support is explained in one line", async () => {
    const page = await visit(DEMO, {}, (made) =>
      made.route("**/v1/steering**", (route) =>
        route.fulfill({ status: 409, json: { error: { message: "this engine cannot steer" } } }),
      ),
    );
    await ready(page);
    await page.getByRole("tab", { name: "Steering" }).click();
    await page.getByText("this engine cannot steer").waitFor();
    await page.locator(".empty pre", { hasText: "clairai serve" }).waitFor();
  });

  it("of all requests is announced, shown on runs, and cleared after a confirmation", async () => {
    const vector = await served();
    const tiers = async (body?: Partial<Tiers>) => {
      const call = body ? { method: "POST", body: JSON.stringify(body) } : {};
      const headers = { "Content-Type": "application/json" };
      return (await (await fetch(`${DEMO}/v1/steering`, { ...call, headers })).json()) as Tiers;
    };
    try {
      await tiers({ base: [{ vector: vector.name, scale: vector.scale }] });
      const page = await visit(DEMO);
      await ready(page);
      await page.locator(".banner", { hasText: `Global steering is on. base: ${vector.name}` }).waitFor();
      await settle(page, { ...SHORT, "Max tokens": "4" });
      await ask(page, "How was your day?");
      await answered(page);
      expect(await page.getByRole("list", { name: "Applied" }).textContent()).toContain(vector.name);
      await page.locator(".banner").getByRole("button", { name: "Clear" }).click();
      await page.getByRole("dialog").getByRole("button", { name: "Clear for all requests" }).click();
      await expect.poll(() => page.locator(".banner").count()).toBe(0);
      expect((await tiers()).base).toEqual([]);
    } finally {
      await tiers({ base: [], prefill: [], decode: [] });
    }
  });
});

describe("a stop rule", () => {
  it("stops the answer and is shown at its token and in the header; an alert lets it continue", async () => {
    const page = await visit(DEMO);
    await ready(page);
    await settle(page, { "Max tokens": "24", Temperature: "0" });
    await page.getByRole("tab", { name: "Steering" }).click();
    await page.getByRole("button", { name: "Add a rule" }).click();
    await page
      .getByRole("group", { name: /^Rule on/ })
      .getByLabel("Probe")
      .selectOption("code");
    await page.getByLabel("Tokens in a row").fill("2");
    await ask(page, "Write a loop in C.");
    await answered(page);
    expect(await page.locator(".answer .who").textContent()).toContain("stopped by a rule");
    const fired = page.locator(".applied .fired");
    expect(await fired.textContent()).toMatch(/Stopped at token \d+: code ≥ [\d.]+ for 2 tokens/);
    const flag = page.locator(".answer .t[data-fired]");
    await expect.poll(() => flag.count()).toBe(1);
    expect(await flag.getAttribute("data-fired")).toBe("stop: code");
    await fired.getByRole("button").click();
    await expect.poll(() => flag.getAttribute("data-pin")).toBe("");
    const file = await exportedJson(page);
    expect(file.done?.stop_reasons?.[0]).toMatch(/^clairai: probe code >= /);
    expect(file.answer.tokens.length).toBeLessThan(24);
    await page.keyboard.press("Escape"); // the pinned token's tooltip covers the buttons
    await page.getByLabel("Then").selectOption("alert");
    await page.getByRole("button", { name: "Regenerate" }).click();
    await page.locator(".fired", { hasText: "Alert at token" }).waitFor();
    await answered(page);
    await expect.poll(() => page.locator(".answer .t").count()).toBe(24);
  });
});

describe.each(["light", "dark"] as const)("in the %s theme axe finds nothing wrong", (colorScheme) => {
  it("with the panel set, with two runs beside each other, and on a phone", async () => {
    const vector = await served();
    for (const options of [{ colorScheme }, { ...PHONE, colorScheme }]) {
      const page = await visit(DEMO, options);
      await ready(page);
      await settle(page, { ...SHORT, "Max tokens": "6" });
      await page.locator(".composer").getByRole("button", { name: "Steering" }).click();
      await page.getByRole("checkbox", { name: vector.name }).check();
      await page.getByLabel("Gate by a probe").check();
      await page.locator(".more summary").click();
      await page.getByRole("button", { name: "Add a rule" }).click();
      expect(await faults(page)).toEqual([]);
      await page.getByLabel("Gate by a probe").uncheck();
      expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBe(
        page.viewportSize()?.width,
      );
      if ("isMobile" in options) await page.locator(".tabs").getByRole("button", { name: "Chat" }).click();
      await askBoth(page, "How was your day?");
      expect(await faults(page)).toEqual([]);
      expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBe(
        page.viewportSize()?.width,
      );
    }
  });
});

it("the user can steer without a mouse", async () => {
  const [vector, page] = [await served(), await visit(DEMO)];
  await ready(page);
  await page.locator("h1").click();
  await page.keyboard.press("s");
  await page.getByRole("checkbox", { name: vector.name }).focus();
  await page.keyboard.press("Space");
  await page.keyboard.press("Tab");
  const number = page.getByLabel(`Scale of ${vector.name}, as a number`);
  const before = Number(await number.inputValue());
  await page.keyboard.press("ArrowRight");
  await expect.poll(async () => Number(await number.inputValue())).toBeGreaterThan(before);
  await page.keyboard.press("Home");
  await expect.poll(async () => Number(await number.inputValue())).toBeLessThan(0);
});
