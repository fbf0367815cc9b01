import { describe, expect, it } from "vitest";
import { DiffCache, diffAnswers } from "../src/data/answerDiff";
import { Transcript } from "../src/data/transcript";
import { prompt, token } from "./wire";

const whole = (...ids: number[]) => ({ ids, isGrowing: false });
const growing = (...ids: number[]) => ({ ids, isGrowing: true });

function marked(
  a: Parameters<typeof diffAnswers>[0],
  b: Parameters<typeof diffAnswers>[1],
): [number[], number[]] {
  const marks = diffAnswers(a, b);
  return [[...marks.a], [...marks.b]];
}

describe("two answers", () => {
  it("that are the same have no marks", () => {
    expect(marked(whole(1, 2, 3), whole(1, 2, 3))).toEqual([[], []]);
  });

  it("are aligned by their common tokens, wherever they are", () => {
    expect(marked(whole(1, 2, 3, 4), whole(1, 9, 9, 3, 4))).toEqual([[1], [1, 2]]);
    expect(marked(whole(1, 2), whole(0, 1, 2))).toEqual([[], [0]]);
    expect(marked(whole(), whole(1))).toEqual([[], [0]]);
  });

  it("of which one is still growing are not compared past its end", () => {
    expect(marked(growing(1, 2), whole(1, 2, 3, 4))).toEqual([[], []]);
    expect(marked(growing(1, 9), whole(1, 2, 3, 4))).toEqual([[1], [1]]);
    expect(marked(whole(1, 2), whole(1, 2, 3, 4))).toEqual([[], [2, 3]]);
  });

  it("with almost nothing in common are marked from the first difference", () => {
    const a = Array.from({ length: 2000 }, (_, i) => (i < 5 ? i : 10_000 + i));
    const b = Array.from({ length: 1500 }, (_, i) => (i < 5 ? i : 50_000 + i));
    const marks = diffAnswers(whole(...a), whole(...b));
    expect([marks.a.size, marks.b.size, marks.a.has(4), marks.a.has(5)]).toEqual([1995, 1495, false, true]);
  });
});

it("transcripts are compared by their answers, and again only when one has changed", () => {
  const [a, b] = [new Transcript(), new Transcript()];
  a.apply(prompt(0, "p"));
  a.apply(token(0, "x", "y"));
  b.apply(prompt(0, "p", "q"));
  b.apply(token(0, "x"));
  const cache = new DiffCache();
  const first = cache.of(a, b, [false, false]);
  expect([[...first.a], [...first.b]]).toEqual([[1], []]);
  expect(cache.of(a, b, [false, false])).toBe(first);
  b.apply(token(1, "y"));
  expect(cache.of(a, b, [false, false]).a.size).toBe(0);
});
