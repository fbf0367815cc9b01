import { describe, expect, it } from "vitest";
import { CrossingFinder } from "../src/data/crossings";
import { Transcript } from "../src/data/transcript";
import { probe, prompt, token, update } from "./wire";

const X = probe("x", { threshold: 0.5 });

function found(scores: (number | null)[], finder = new CrossingFinder("r", [X])): [number, number, number][] {
  const transcript = new Transcript();
  transcript.apply(token(0, ...scores.map(() => "t")));
  for (const [i, score] of scores.entries()) {
    transcript.apply(update("answer", i, ["x"], [score]));
    finder.scan(transcript);
  }
  return finder.found.map(({ first, last, peak }) => [first.index, last.index, peak]);
}

describe("crossings of a threshold", () => {
  it("are stretches with their peak", () => {
    expect(found([0.1, 0.6, 0.9, 0.7, 0.2, 0.5, 0.1])).toEqual([
      [1, 3, 0.9],
      [5, 5, 0.5],
    ]);
  });

  it("begin at the threshold itself", () => {
    expect(found([0.4999999, 0.5])).toEqual([[1, 1, 0.5]]);
  });

  it("end where a score is missing", () => {
    expect(found([0.9, null, 0.9])).toEqual([
      [0, 0, 0.9],
      [2, 2, 0.9],
    ]);
  });

  it("of a probe without a threshold do not exist", () => {
    expect(found([0.9], new CrossingFinder("r", [probe("x", { threshold: null })]))).toEqual([]);
  });

  it("are found once, however often the transcript is scanned", () => {
    const transcript = new Transcript();
    transcript.apply(token(0, "a"));
    transcript.apply(update("answer", 0, ["x"], [0.9]));
    const finder = new CrossingFinder("r", [X]);
    expect([finder.scan(transcript), finder.scan(transcript), finder.scan(transcript)]).toEqual([
      true,
      false,
      false,
    ]);
    expect(finder.found).toHaveLength(1);
  });

  it("do not continue from the prompt into the answer", () => {
    const transcript = new Transcript();
    transcript.apply(prompt(0, "p"));
    transcript.apply(update("prompt", 0, ["x"], [0.9]));
    transcript.apply(token(0, "a"));
    transcript.apply(update("answer", 0, ["x"], [0.9]));
    const finder = new CrossingFinder("r", [X]);
    finder.scan(transcript);
    expect(finder.found.map(({ first }) => first.part)).toEqual(["prompt", "answer"]);
  });

  it("are found again when the prompt arrives after the answer's first tokens", () => {
    const transcript = new Transcript();
    const finder = new CrossingFinder("r", [X]);
    transcript.apply(token(0, "a"));
    transcript.apply(update("answer", 0, ["x"], [0.9]));
    finder.scan(transcript);
    transcript.apply(prompt(0, "p"));
    transcript.apply(update("prompt", 0, ["x"], [0.1]));
    finder.scan(transcript);
    expect(finder.found.map(({ first }) => [first.part, first.index])).toEqual([["answer", 0]]);
  });
});
