import { describe, expect, it } from "vitest";
import { answered, ask, DEMO, exportedJson, ready, settle, setUpPages } from "./support";

const visit = setUpPages();

describe("asking", () => {
  it("starts with a sentence and examples, and an example makes its probe cross its threshold", async () => {
    const page = await visit(DEMO);
    await ready(page);
    expect(await page.locator(".first-sentence").textContent()).toMatch(/probes inside it score every token/);
    expect(await page.locator(".example").count()).toBeGreaterThanOrEqual(6);
    await settle(page, { "Max tokens": "48", Temperature: "0" });
    const example = page.locator(".example", { has: page.locator(".example-probe", { hasText: /^code$/ }) });
    await example.first().click();
    await page.locator(".answer .t.over").first().waitFor();
    await expect.poll(() => page.getByLabel("Coloured by").inputValue()).toBe("code");
    await answered(page);
    const colours = new Set(
      await page
        .locator(".answer .t")
        .evaluateAll((spans) => spans.map((span) => getComputedStyle(span).backgroundColor)),
    );
    expect(colours.size).toBeGreaterThan(3);
    expect(await page.locator(".question .t").count()).toBeGreaterThan(5);
    expect(await page.locator(".scale-numbers").textContent()).toMatch(/threshold 0\.\d/);
    const decoration = await page
      .locator(".answer .t.over")
      .first()
      .evaluate((span) => getComputedStyle(span).textDecorationLine);
    expect(decoration).toBe("underline");
  });

  it("shows for every token the scores that the API returns for the same question", async () => {
    const page = await visit(DEMO);
    await ready(page);
    await settle(page, { "Max tokens": "12", Temperature: "0" });
    await ask(page, "What is the capital of France?");
    await answered(page);
    const file = await exportedJson(page);
    const answer = await fetch(`${DEMO}/v1/chat/completions`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        model: file.run.model,
        messages: [{ role: "user", content: "What is the capital of France?" }],
        max_tokens: 12,
        temperature: 0,
        return_token_ids: true,
        clairai: { probes: "all", prompt_scores: true },
      }),
    });
    interface Scored {
      names: string[];
      scores: (number | null)[][];
    }
    const { choices } = (await answer.json()) as {
      choices: [
        { token_ids: number[]; probe_scores: Scored; prompt_scores: Scored & { token_ids: number[] } },
      ];
    };
    const [{ token_ids, probe_scores, prompt_scores }] = choices;
    expect(file.answer.token_ids).toEqual(token_ids);
    expect(file.prompt.token_ids).toEqual(prompt_scores.token_ids);
    expect(file.names).toEqual(probe_scores.names);
    expectClose(file.answer.scores, probe_scores.scores);
    expectClose(file.prompt.scores, prompt_scores.scores);
    expect(file.answer.scores.at(-1)?.every((value) => value === null)).toBe(true);
  });

  it("stops, and the server stops too", async () => {
    const page = await visit(DEMO);
    await ready(page);
    await settle(page, { "Max tokens": "900" });
    const deleted = page.waitForResponse((response) => response.request().method() === "DELETE");
    await ask(page, "Tell a very long story about a lighthouse.");
    await page.locator(".answer .t").nth(8).waitFor();
    await page.locator(".composer").getByRole("button", { name: "Stop" }).click();
    expect((await deleted).ok()).toBe(true);
    await answered(page);
    expect(await page.locator(".answer .who").textContent()).toContain("stopped");
    expect(await page.locator(".answer .t").count()).toBeLessThan(890);
  });

  it("asks again, edits, and keeps every variant in the history", async () => {
    const page = await visit(DEMO);
    await ready(page);
    await settle(page, { "Max tokens": "10", Temperature: "1", Seed: "1" });
    await ask(page, "Name a colour.");
    await answered(page);
    await settle(page, { Seed: "2" });
    await page.getByRole("button", { name: "Regenerate" }).click();
    await page.locator(".variants").getByText("2 of 2").waitFor();
    await answered(page);
    await page.getByRole("button", { name: "Edit" }).click();
    await page.getByLabel("Edit the question").fill("Name an animal.");
    await page.getByRole("button", { name: "Ask again" }).click();
    await page.locator(".question", { hasText: "Name an animal." }).waitFor();
    await answered(page);
    await page.getByRole("tab", { name: "History" }).click();
    await expect
      .poll(() => page.locator(".entry-text").allTextContents())
      .toEqual(["Name an animal.", "Name a colour.", "Name a colour."]);
  });

  it("continues a conversation with its system prompt and its earlier turns", async () => {
    const page = await visit(DEMO);
    await ready(page);
    await settle(page, { "Max tokens": "8", Temperature: "0", "System prompt": "Answer in one word." });
    await ask(page, "Hello");
    await answered(page);
    const second = page.waitForRequest((request) => request.method() === "POST");
    await ask(page, "And again?");
    const { messages } = (await second).postDataJSON() as { messages: { role: string; content: string }[] };
    expect(messages.map(({ role }) => role)).toEqual(["system", "user", "assistant", "user"]);
    expect(messages[2]?.content.length).toBeGreaterThan(0);
    await page.locator(".turn").nth(1).waitFor();
    await answered(page);
  });
});

function expectClose(found: ((number | null)[] | null)[], expected: (number | null)[][]): void {
  expect(found).toHaveLength(expected.length);
  for (const [i, row] of expected.entries()) {
    for (const [j, value] of row.entries()) {
      const ours = found[i]?.[j] ?? null;
      if (value === null) expect(ours).toBeNull();
      // The same sums in a batch of another shape can differ in the last bits.
      else expect(ours).toBeCloseTo(value, 3);
    }
  }
}
