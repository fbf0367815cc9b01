import { describe, expect, it } from "vitest";
import { Lookout } from "../src/data/excursions";
import { Tape } from "../src/data/tape";
import { probe, prompt, token, update } from "./wire";

const X = probe("x", { threshold: 0.5 });

function found(scores: (number | null)[], lookout = new Lookout("r", [X])): [number, number, number][] {
  const tape = new Tape();
  tape.apply(token(0, ...scores.map(() => "t")));
  for (const [i, score] of scores.entries()) {
    tape.apply(update("answer", i, ["x"], [score]));
    lookout.scan(tape);
  }
  return lookout.found.map(({ first, last, peak }) => [first.index, last.index, peak]);
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
    expect(found([0.9], new Lookout("r", [probe("x", { threshold: null })]))).toEqual([]);
  });

  it("are found once, however often one looks", () => {
    const tape = new Tape();
    tape.apply(token(0, "a"));
    tape.apply(update("answer", 0, ["x"], [0.9]));
    const lookout = new Lookout("r", [X]);
    expect([lookout.scan(tape), lookout.scan(tape), lookout.scan(tape)]).toEqual([true, false, false]);
    expect(lookout.found).toHaveLength(1);
  });

  it("do not run from the prompt into the answer", () => {
    const tape = new Tape();
    tape.apply(prompt(0, "p"));
    tape.apply(update("prompt", 0, ["x"], [0.9]));
    tape.apply(token(0, "a"));
    tape.apply(update("answer", 0, ["x"], [0.9]));
    const lookout = new Lookout("r", [X]);
    lookout.scan(tape);
    expect(lookout.found.map(({ first }) => first.part)).toEqual(["prompt", "answer"]);
  });

  it("are found anew where the prompt comes after the answer's first tokens", () => {
    const tape = new Tape();
    const lookout = new Lookout("r", [X]);
    tape.apply(token(0, "a"));
    tape.apply(update("answer", 0, ["x"], [0.9]));
    lookout.scan(tape);
    tape.apply(prompt(0, "p"));
    tape.apply(update("prompt", 0, ["x"], [0.1]));
    lookout.scan(tape);
    expect(lookout.found.map(({ first }) => [first.part, first.index])).toEqual([["answer", 0]]);
  });
});
