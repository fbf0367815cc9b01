import { describe, expect, it } from "vitest";
import { ProtocolError } from "../src/api/events";
import { Transcript } from "../src/data/transcript";
import { prompt, token, update } from "./wire";

function transcriptOf(...events: Parameters<Transcript["apply"]>[0][]): Transcript {
  const transcript = new Transcript();
  for (const event of events) transcript.apply(event);
  return transcript;
}

describe("a transcript", () => {
  it("puts the prompt before the answer and scores where they belong", () => {
    const transcript = transcriptOf(
      prompt(0, "p", "q"),
      update("prompt", 0, ["x"], [0.1], [0.2]),
      token(0, "a", "b"),
      update("answer", 0, ["x"], [0.3]),
    );
    expect(transcript.tokens).toEqual(["p", "q", "a", "b"]);
    expect([...transcript.scores.column("x")]).toEqual([0.1, 0.2, 0.3, NaN]);
    expect(transcript.text).toBe("ab");
  });

  it("distinguishes a null score from one that has not arrived", () => {
    const transcript = transcriptOf(token(0, "a", "b"), update("answer", 0, ["x"], [null]));
    expect(transcript.scores.hasArrived(0)).toBe(true);
    expect(transcript.scores.hasArrived(1)).toBe(false);
    expect(transcript.scores.value("x", 0)).toBeNaN();
  });

  it("keeps every score at its token when the prompt arrives late and in parts", () => {
    const transcript = transcriptOf(
      token(0, "a", "b"),
      update("answer", 0, ["x"], [0.7], [0.8]),
      prompt(0, "p"),
      update("prompt", 0, ["x"], [0.1]),
      prompt(1, "q", "r"),
    );
    expect(transcript.tokens).toEqual(["p", "q", "r", "a", "b"]);
    expect(transcript.ids).toEqual([0, 1, 2, 100, 101]);
    expect([...transcript.scores.column("x")]).toEqual([0.1, NaN, NaN, 0.7, 0.8]);
    expect(transcript.scores.hasArrived(1)).toBe(false);
    expect(transcript.tokenAt(3)).toEqual({ part: "answer", index: 0 });
    expect(transcript.rowOf({ part: "answer", index: 1 })).toBe(4);
  });

  it("adds a column for a probe that appears in the middle", () => {
    const transcript = transcriptOf(
      token(0, "a", "b"),
      update("answer", 0, ["x"], [1]),
      update("answer", 1, ["x", "y"], [2, 3]),
    );
    expect([...transcript.scores.column("y")]).toEqual([NaN, 3]);
  });

  it("knows the tokens of the prompt that stand for an image", () => {
    const scored = update("prompt", 1, ["x"], [0.1], [0.2], [0.3]);
    if (scored.kind === "probe_update") scored.data.media = [{ kind: "image", start: 2, span: 2 }];
    const transcript = transcriptOf(prompt(0, "p", "q", "<image>", "<image>"), scored, token(0, "a"));
    expect([...transcript.media]).toEqual([
      [2, "image"],
      [3, "image"],
    ]);
    expect(transcript.wordAt(2)).toBe("▪");
    expect(transcript.wordAt(4)).toBe("a");
    expect(transcript.tokens[2]).toBe("<image>");
  });

  it("refuses a token out of order", () => {
    expect(() => transcriptOf(token(0, "a"), token(2, "c"))).toThrow(ProtocolError);
  });

  it("refuses a score for a token that has not arrived", () => {
    expect(() => transcriptOf(token(0, "a"), update("answer", 1, ["x"], [1]))).toThrow(ProtocolError);
  });

  it("ignores other choices", () => {
    const other = token(0, "z");
    if (other.kind === "token") other.data.choice = 1;
    expect(transcriptOf(token(0, "a"), other).tokens).toEqual(["a"]);
  });

  it("sums the lost rows, and uses the final count if it is higher", () => {
    const transcript = transcriptOf(token(0, "a", "b"));
    const lossy = update("answer", 0, ["x"], [null], [null]);
    if (lossy.kind === "probe_update") lossy.data.lost = 2;
    transcript.apply(lossy);
    expect(transcript.lost).toBe(2);
    const final = {
      choice: 0,
      names: ["x"],
      count: 0,
      mean: [null],
      max: [null],
      argmax: [null],
      above: [null],
    };
    transcript.apply({ kind: "probe_final", data: { ...final, lost: 5 } });
    expect(transcript.lost).toBe(5);
  });

  it("accepts a prompt of two hundred thousand tokens", () => {
    const tokens = Array.from({ length: 200_000 }, () => "t");
    expect(
      transcriptOf(prompt(0, ...tokens.slice(0, 10)), prompt(10, ...tokens.slice(0, 60_000))).length,
    ).toBe(60_010);
    const transcript = new Transcript();
    transcript.apply({
      kind: "token",
      data: { part: "prompt", choice: 0, start: 0, tokens, token_ids: tokens.map((_, i) => i), text: "" },
    });
    expect(transcript.promptLength).toBe(200_000);
  });
});
