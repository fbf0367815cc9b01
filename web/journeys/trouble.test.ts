import type { Page, Route } from "playwright-core";
import { describe, expect, it } from "vitest";
import { frame, prompt, token, update, DONE } from "../tests/wire";
import type { RunEvent } from "../src/api/events";
import { relayTo } from "./relay";
import {
  answered,
  ask,
  DEMO,
  exportedJson,
  ready,
  settle,
  WAITING,
  WAITING_KEY,
  setUpPages,
} from "./support";

const visit = setUpPages();

describe("when something is wrong, the page", () => {
  it("says that the engine is starting", async () => {
    const page = await visit(WAITING);
    await page.locator(".banner", { hasText: "The engine is starting." }).waitFor();
    await expect.poll(() => page.locator(".status").textContent()).toBe("starting");
    expect(await page.getByRole("button", { name: "Ask" }).isDisabled()).toBe(true);
  });

  it("is shown in a browser whose language Intl refuses", async () => {
    const page = await visit(WAITING, {}, (made) =>
      made.addInitScript(() => {
        Object.defineProperty(navigator, "language", { value: "en-US@posix", configurable: true });
      }),
    );
    await page.locator(".banner", { hasText: "The engine is starting." }).waitFor();
  });

  it("asks for the key, refuses a wrong one, and accepts the right one", async () => {
    // The engine behind this proxy never starts; only its health is faked.
    const page = await visit(WAITING, {}, (made) =>
      made.route("**/health", (route) =>
        route.fulfill({ json: { status: "ready", reason: null, model: "m", version: "0" } }),
      ),
    );
    const dialog = page.getByRole("dialog", { name: "API key" });
    await dialog.waitFor();
    await dialog.getByLabel("Key").fill("wrong");
    await page.keyboard.press("Enter");
    await dialog.getByText("That key was not accepted").waitFor();
    await dialog.getByLabel("Key").fill(WAITING_KEY);
    await page.keyboard.press("Enter");
    await expect.poll(() => dialog.count()).toBe(0);
    // With the right key the server reports that the engine is missing.
    await page.locator(".banner").first().waitFor();
    expect(await page.evaluate(() => JSON.stringify(sessionStorage))).toContain(WAITING_KEY);
    expect(await page.evaluate(() => JSON.stringify(localStorage))).not.toContain(WAITING_KEY);
  });

  it("says that it is disconnected, keeps its content, and reconnects by itself", async () => {
    const page = await visit(DEMO);
    await ready(page);
    await page.context().setOffline(true);
    await page.locator(".banner", { hasText: "Disconnected." }).waitFor();
    expect(await page.locator(".example").count()).toBeGreaterThan(0);
    await page.context().setOffline(false);
    await expect.poll(() => page.locator(".banner").count()).toBe(0);
  });

  it("continues a run after a broken connection, without a second generation", async () => {
    await using wire = await relayTo(DEMO);
    const page = await visit(wire.url);
    await ready(page);
    await settle(page, { "Max tokens": "80", Temperature: "0" });
    const posts: string[] = [];
    const resumed: string[] = [];
    page.on("request", (request) => {
      if (request.method() === "POST") posts.push(request.url());
      if (request.url().includes("v1/runs/")) resumed.push(request.url());
    });
    wire.holdsEnds = true; // however fast the answer comes, it is cut before its end
    await ask(page, "Tell a story about a lighthouse.");
    await page.locator(".answer .t").nth(10).waitFor();
    wire.cut();
    await page.locator(".answer .t").nth(30).waitFor();
    wire.holdsEnds = false;
    wire.cut();
    await answered(page);
    const file = await exportedJson(page);
    expect(posts).toHaveLength(1);
    expect(resumed.length).toBeGreaterThanOrEqual(2);
    expect(file.answer.tokens).toHaveLength(80);
    expect(file.answer.scores.slice(0, -1).every((row) => row?.every((value) => value !== null))).toBe(true);
  });

  it("resumes a run that was going when the page was reloaded", async () => {
    const page = await visit(DEMO);
    await ready(page);
    await settle(page, { "Max tokens": "80", Temperature: "0" });
    await ask(page, "Tell a story about a mountain.");
    await page.locator(".answer .t").nth(10).waitFor();
    await page.reload();
    await answered(page);
    expect((await exportedJson(page)).answer.tokens).toHaveLength(80);
  });

  it("says that there are no probes, and how to add one", async () => {
    const page = await visit(DEMO, {}, (made) =>
      made.route("**/v1/probes", (route) => route.fulfill({ json: { data: [], capacity: 16, version: 1 } })),
    );
    await page.locator(".empty pre", { hasText: "clairai probes add" }).waitFor();
  });

  it("reports a degraded engine and lost scores", async () => {
    const page = await visit(DEMO, {}, async (made) => {
      await made.route("**/health", (route) =>
        route.fulfill({ json: { status: "degraded", reason: "the ring is gone", model: "m", version: "0" } }),
      );
      await streamed(made, [token(0, "a", "b"), lossy(), DONE]);
    });
    await page.locator(".banner", { hasText: "The ring is gone." }).waitFor();
    await ready(page);
    await ask(page, "Anything");
    await page.locator(".warning", { hasText: "2 tokens lost their scores" }).waitFor();
    await expect.poll(() => page.locator(".answer .t.none").count()).toBe(2);
  });

  it("shows the server's message when it refuses", async () => {
    const page = await visit(DEMO);
    await ready(page);
    await settle(page, { "Max tokens": "100000" });
    await ask(page, "Too much");
    await page.locator(".failure").waitFor();
    expect(await page.locator(".failure").textContent()).toMatch(/100000|context|max_tokens|length/i);
  });

  it("shows a model's output as text, whatever it contains", async () => {
    const hostile = [
      '<img src=x onerror="window.harmed=1">',
      "<script>window.harmed=1</script>",
      "\u202eevil",
      "</div>",
      "",
    ];
    const page = await visit(DEMO, {}, (made) =>
      streamed(made, [
        prompt(0, "<b>", "x"),
        update("prompt", 0, ["code"], [0.9], [0.1]),
        token(0, ...hostile),
        DONE,
      ]),
    );
    await ready(page);
    await ask(page, "<img src=x onerror='window.harmed=1'>");
    await answered(page);
    const texts = await page.locator(".answer .t").allTextContents();
    expect(texts).toEqual([...hostile.slice(0, 2), "\\u202eevil", ...hostile.slice(3)]);
    await page.getByRole("button", { name: "View" }).click();
    await page.getByLabel("Answers as Markdown").check();
    await page.locator(".answer .markdown").waitFor();
    expect(await page.locator(".answer img, .answer script, .turn b").count()).toBe(0);
    expect(await page.evaluate(() => "harmed" in window)).toBe(false);
  });
});

function lossy(): RunEvent {
  const event = update("answer", 0, ["code"], [null], [null]);
  if (event.kind === "probe_update") event.data.lost = 2;
  return event;
}

/** Answer the next question with these events, which a real model cannot be made to produce. */
async function streamed(page: Page, events: RunEvent[]): Promise<void> {
  const body = events.map((event, i) => frame(i + 1, event)).join("");
  await page.route("**/v1/chat/completions", (route: Route) =>
    route.fulfill({ body, headers: { "Content-Type": "text/event-stream", "X-Clairai-Run": "0" } }),
  );
}
