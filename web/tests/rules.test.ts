import { describe, expect, it } from "vitest";
import type { StopRule } from "../src/api/steering";
import { firings, ruleDraftOf, ruleFault, rulesOf, stopWords, type RuleDraft } from "../src/data/rules";
import { Transcript } from "../src/data/transcript";
import { probe, prompt, token, update } from "./wire";

const RULE: StopRule = { probe: "x", tokens: 2, action: "stop" };

/** An answer with these scores, after a prompt that is over the threshold throughout. */
function scored(...values: (number | null)[]): Transcript {
  const transcript = new Transcript();
  transcript.apply(prompt(0, "p", "q", "r"));
  transcript.apply(update("prompt", 0, ["x"], [0.9], [0.9], [0.9]));
  transcript.apply(token(0, ...values.map(String), "last"));
  transcript.apply(update("answer", 0, ["x"], ...values.map((value) => [value])));
  return transcript;
}

const at = (transcript: Transcript, rule: StopRule = RULE) =>
  firings(transcript, [rule], [probe("x")])[0]?.indices[0] ?? null;

describe("a stop rule", () => {
  it("fires at the token that completes it, at the threshold and over", () => {
    expect(at(scored(0.1, 0.5, 0.6, 0.9))).toBe(2);
    expect(at(scored(0.1, 0.5, 0.6), { ...RULE, tokens: 1 })).toBe(1);
  });

  it("counts no token of the prompt", () => {
    expect(at(scored(0.9, 0.1))).toBeNull();
  });

  it("needs consecutive tokens: one below the threshold or without a score restarts it", () => {
    expect(at(scored(0.9, 0.1, 0.9, 0.1))).toBeNull();
    expect(at(scored(0.9, null, 0.9))).toBeNull();
    expect(at(scored(0.9, null, 0.9, 0.9))).toBe(3);
  });

  it("uses its own threshold before the probe's", () => {
    expect(at(scored(0.3, 0.3), { ...RULE, threshold: 0.3 })).toBe(1);
    expect(at(scored(0.9, 0.9), { ...RULE, threshold: 0.95 })).toBeNull();
  });

  it("that only alerts fires each time its probe stayed high", () => {
    const alert: StopRule = { ...RULE, action: "alert" };
    const transcript = scored(0.9, 0.9, 0.9, 0.1, 0.9, 0.9);
    expect(firings(transcript, [alert], [probe("x")])[0]?.indices).toEqual([1, 5]);
    expect(firings(transcript, [RULE], [probe("x")])[0]?.indices).toEqual([1]);
  });

  it("uses the threshold that the engine reports", () => {
    const transcript = scored(0.9, 0.9);
    transcript.apply({
      kind: "steering",
      data: { clairai: { steering: [], stop: [{ ...RULE, threshold: 0.95 }] } },
    });
    expect(at(transcript)).toBeNull();
  });

  it("waits for scores that have not arrived", () => {
    const transcript = scored(0.9);
    transcript.apply(token(2, "a", "b"));
    expect(at(transcript)).toBeNull();
  });

  it("does not fire without a threshold", () => {
    expect(firings(scored(0.9, 0.9), [RULE], [probe("x", { threshold: null })])).toEqual([]);
  });
});

describe("a rule of the panel", () => {
  const draft: RuleDraft = { id: 1, probe: "x", threshold: null, tokens: 3, action: "stop" };

  it("is sent with what was set, and read back", () => {
    expect(rulesOf([draft])).toEqual([{ probe: "x", tokens: 3, action: "stop" }]);
    const set: RuleDraft = { ...draft, threshold: 0.25, action: "alert" };
    expect(ruleDraftOf(1, rulesOf([set])[0])).toEqual(set);
    expect(ruleDraftOf(1, { tokens: 3 })).toBeNull();
    expect(ruleDraftOf(1, { probe: "x", tokens: 3, action: "steer", steer: [] })).toBeNull();
  });

  it.each<[Partial<RuleDraft>, string]>([
    [{ probe: "gone" }, "Choose a probe"],
    [{ probe: "bare" }, "no threshold"],
    [{ tokens: 0 }, "whole number"],
    [{ tokens: 1.5 }, "whole number"],
    [{ tokens: null }, "whole number"],
  ])("is refused with %j", (change, words) => {
    const probes = [probe("x"), probe("bare", { threshold: null })];
    expect(ruleFault({ ...draft, ...change }, probes)).toContain(words);
    expect(ruleFault(draft, probes)).toBeNull();
  });
});

it("only the reason of a stop rule is read as one", () => {
  expect(stopWords("clairai: probe x >= 0.5 for 2 tokens")).toBe("probe x >= 0.5 for 2 tokens");
  expect([stopWords("</s>"), stopWords(2), stopWords(null), stopWords(undefined)]).toEqual([
    null,
    null,
    null,
    null,
  ]);
});
