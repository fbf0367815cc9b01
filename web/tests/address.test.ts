import { describe, expect, it } from "vitest";
import type { SteerEntry, StopRule } from "../src/api/steering";
import { rulesOf } from "../src/data/rules";
import { entriesOf } from "../src/data/entryDraft";
import { addressOf, parseAddress } from "../src/state/address";
import { EMPTY } from "../src/state/store";
import { NO_SAMPLING, type State } from "../src/state/types";

const SHOWN: State = {
  ...EMPTY,
  head: "r1",
  versus: "r2",
  probe: "negative sentiment & more",
  lines: ["a/b", "c"],
  pane: "charts",
  hasMarks: true,
};

describe("the address", () => {
  it("restores the view", () => {
    const address = parseAddress(addressOf(SHOWN, { part: "prompt", index: 12 }, null));
    expect(address).toEqual({
      run: "r1",
      versus: "r2",
      probe: "negative sentiment & more",
      lines: ["a/b", "c"],
      at: { part: "prompt", index: 12 },
      pane: "charts",
      hasMarkdown: false,
      hasMarks: true,
      hasMono: false,
      question: null,
    });
  });

  it("is empty for a page just opened", () => {
    expect(addressOf(EMPTY, null, null)).toBe("");
    expect(parseAddress("").run).toBeNull();
  });

  it("carries a question to a browser that does not have the run", () => {
    const words = { user: "Pourquoi ?\n#&=", system: "Be brief", sampling: { ...NO_SAMPLING, seed: 7 } };
    const steer: SteerEntry[] = [{ vector: "joy", scale: -2, op: "add", when: "prompt" }];
    const stop: StopRule[] = [{ probe: "code", tokens: 2, action: "alert" }];
    const offered = parseAddress(addressOf(SHOWN, null, { ...words, steer, stop })).question;
    expect(offered).toMatchObject(words);
    expect(entriesOf(offered?.entries ?? [])).toEqual(steer);
    expect(rulesOf(offered?.rules ?? [])).toEqual(stop);
  });

  it("omits a question that is too long for a link", () => {
    const question = { user: "x".repeat(7000), system: "", sampling: NO_SAMPLING, steer: [], stop: [] };
    expect(parseAddress(addressOf(SHOWN, null, question)).question).toBeNull();
  });

  it.each([
    "#at=z9&pane=nowhere&line=",
    "#at=a99999999999",
    "#ask={",
    "#ask=null",
    "#ask=%7B%22user%22%3A5%7D",
    `#probe=${"x".repeat(500)}`,
    "#%E0%A4%A",
  ])("leaves out what it does not understand in %s", (hash) => {
    const address = parseAddress(hash);
    expect([address.at, address.pane, address.lines, address.question, address.probe]).toEqual([
      null,
      null,
      null,
      null,
      null,
    ]);
  });

  it("accepts only numbers, nulls and stop sequences as settings of a link", () => {
    const ask = JSON.stringify({
      user: "u",
      sampling: { seed: "1", temperature: 0.5, top_p: null, stop: ["a", 3] },
    });
    const sampling = parseAddress(`#${new URLSearchParams({ ask }).toString()}`).question?.sampling;
    expect(sampling).toEqual({ ...NO_SAMPLING, temperature: 0.5, stop: ["a"] });
  });

  it("names at most eight lines, each one once", () => {
    const hash = `#${["a", "a", "b", "c", "d", "e", "f", "g", "h", "i"].map((name) => `line=${name}`).join("&")}`;
    expect(parseAddress(hash).lines).toEqual(["a", "b", "c", "d", "e", "f", "g", "h"]);
  });
});
