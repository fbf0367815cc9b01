import { describe, expect, it } from "vitest";
import { locate } from "../src/text/locate";
import { brief, count, counted, inWords, score, signed } from "../src/text/number";
import { isBehind, placeOf } from "../src/text/point";
import { entryWords, tierWords } from "../src/text/steeringWords";
import { kindOf, leadOf, shown, spoken, visible } from "../src/text/token";

describe("a token", () => {
  it.each([
    [" sky", "plain"],
    ["", "fragment"],
    ["\n\n", "newline"],
    [".\n", "newline"],
    ["   ", "space"],
    ["\t", "space"],
    ["<|im_start|>", "special"],
    ["<|endoftext|>", "special"],
    ["</s>", "special"],
    ["[INST]", "special"],
    ["<b>", "plain"],
    ["<", "plain"],
    ["a<|x|>", "plain"],
  ])("%j is of the kind %s", (text, kind) => {
    expect(kindOf(text)).toBe(kind);
  });

  it("is completely visible in a tooltip", () => {
    expect(visible(" a\n\tb")).toBe("·a↵→b");
    expect(visible("\u202egnp.\u200b\u0007")).toBe("\\u202egnp.\\u200b\\u0007");
    expect(visible("")).toBe("(part of a character)");
  });

  it("keeps its text on the page except for control and direction characters", () => {
    expect(shown(" a\n\tb")).toBe(" a\n\tb");
    expect(shown("<img src=x>")).toBe("<img src=x>");
    expect(shown("\u202eabc\u0000")).toBe("\\u202eabc\\u0000");
    expect(shown("مرحبا 你好 🙂")).toBe("مرحبا 你好 🙂");
  });

  it("marks its leading white space", () => {
    expect(leadOf("  \tx y")).toBe("··→");
    expect(leadOf("x ")).toBe("");
  });

  it("can be read aloud", () => {
    expect(spoken("  ")).toBe("2 spaces");
    expect(spoken("\n")).toBe("new line");
    expect(spoken(" sky")).toBe("sky");
    expect(spoken("")).toBe("part of a character");
  });
});

describe("the user's words in a prompt", () => {
  const prompt = ["<|im_start|>", "user", "\n", "Why", " is", " the sky", " blue", "?", "<|im_end|>", "\n"];

  it("are found among the template's", () => {
    expect(locate(prompt, "Why is the sky blue?")).toEqual([3, 8]);
  });

  it("are found without the spaces around them", () => {
    expect(locate(prompt, "  Why is the sky blue?\n")).toEqual([3, 8]);
  });

  it("are the last of several: the newest turn's", () => {
    expect(locate(["a", " b", "x", "a", " b"], "a b")).toEqual([3, 5]);
  });

  it("include a token that they share with the template", () => {
    expect(locate(["user\nWhy", " not", "?<end>"], "Why not?")).toEqual([0, 3]);
  });

  it("are not found if the template changed them", () => {
    expect(locate(prompt, "Why is the sky green?")).toBeNull();
    expect(locate(prompt, "   ")).toBeNull();
  });
});

describe("a number", () => {
  it.each([
    [0, "0"],
    [0.93123, "0.9312"],
    [0.00012, "1.20e−4"],
    [-3.5, "−3.5000"],
    [12.34567, "12.346"],
    [1234.56, "1234.6"],
    [NaN, "–"],
  ])("%d is shown as %s", (value, text) => {
    expect(score(value)).toBe(text);
  });

  it("has a sign in a difference", () => {
    expect(signed(0.5)).toBe("+0.5000");
    expect(signed(-0.5)).toBe("−0.5000");
  });

  it("is short on axes", () => {
    expect([brief(0), brief(0.001), brief(0.25), brief(12.34), brief(1e-5)]).toEqual([
      "0.00",
      "0.001",
      "0.25",
      "12.3",
      "1e−5",
    ]);
  });

  it("is counted with its noun", () => {
    expect([counted(1, "token"), counted(1234, "token"), count(9), inWords(6), inWords(64)]).toEqual([
      "1 token",
      "1,234 tokens",
      "9",
      "six",
      "64",
    ]);
  });
});

it("a point is read as layer and place", () => {
  expect(placeOf("post_block.16")).toEqual({ layer: 16, where: "after the block" });
  expect(placeOf("elsewhere")).toEqual({ layer: -1, where: "elsewhere" });
});

it("points are ordered as in a forward pass; after a block is before the next one", () => {
  expect(isBehind("post_block.3", "post_attn.3")).toBe(true);
  expect(isBehind("post_block.3", "pre_attn.4")).toBe(false);
  expect(isBehind("pre_attn.4", "post_block.3")).toBe(false);
  expect(isBehind("pre_attn.3", "post_block.10")).toBe(false);
  expect(isBehind("somewhere", "post_block.1")).toBe(false);
});

describe("steering in words", () => {
  it("says what is done, where, when and under which gate", () => {
    expect(
      entryWords({
        vector: "joy",
        scale: -2,
        op: "add",
        points: ["post_block.15"],
        when: { phase: "prompt", positions: [[0, 4]], skip_special: true },
        gate: { probe: "code", threshold: 0.5, latch: true },
      }),
    ).toBe(
      "joy −2 at post_block.15 in the prompt, at positions 0:4, without special tokens while code ≥ 0.5 (latched)",
    );
    expect(entryWords({ vector: "joy", op: "clamp", high: 3, when: "both" })).toBe(
      "joy clamped ≤ 3 on every token",
    );
    expect(entryWords({ vector: null, op: "ablate", scale: 0.5 })).toBe(
      "an inline vector ablated × 0.5 on every token",
    );
    expect(entryWords({ vector: "joy", scale: 0.25, match_norm: true })).toBe(
      "joy +0.25 of the norm on every token",
    );
  });

  it("names only the tiers that steer", () => {
    expect(tierWords({ base: [], prefill: [{ vector: "joy", scale: 2 }], decode: [] })).toBe(
      "prefill: joy +2 in the prompt",
    );
    expect(tierWords({ base: [], prefill: [], decode: [] })).toBe("");
  });
});
