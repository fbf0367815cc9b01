import { describe, expect, it } from "vitest";
import { Transcript } from "../src/data/transcript";
import { drawLine } from "../src/views/charts/drawLine";
import { highest, pixelsOf } from "../src/views/charts/pixels";
import { clipped, difference, extentOf, isCommon, spread, traceOf } from "../src/views/charts/traces";
import { placeTip } from "../src/views/tip/placeTip";
import { rankOf } from "../src/views/tip/rank";
import { tokenClasses } from "../src/views/tokens/tokenClasses";
import { grouped, matching, ordered } from "../src/views/sidebar/probeGroups";
import { probe, prompt, token, update } from "./wire";

function transcriptOf(answer: (number | null)[], before: number[] = []): Transcript {
  const transcript = new Transcript();
  transcript.apply(prompt(0, ...before.map(() => "p")));
  if (before.length > 0) transcript.apply(update("prompt", 0, ["x"], ...before.map((value) => [value])));
  transcript.apply(token(0, ...answer.map(() => "a")));
  if (answer.length > 0) transcript.apply(update("answer", 0, ["x"], ...answer.map((value) => [value])));
  return transcript;
}

const X = probe("x");
const LUT = Uint32Array.from({ length: 256 }, (_, i) => i + 1);

describe("the axis of tokens", () => {
  it("begins with the prompt below zero", () => {
    expect(extentOf([transcriptOf([0.1, 0.2], [0.3])])).toEqual({ from: -1, to: 2 });
    expect(extentOf([transcriptOf([1], [1, 1]), transcriptOf([1, 1, 1])])).toEqual({ from: -2, to: 3 });
  });

  it("can be clipped to a range, and is whole if the range lies outside", () => {
    expect(clipped({ from: -5, to: 20 }, [-9, 4])).toEqual({ from: -5, to: 4 });
    expect(clipped({ from: 0, to: 5 }, [10, 20])).toEqual({ from: 0, to: 5 });
    expect(clipped({ from: 0, to: 5 }, null)).toEqual({ from: 0, to: 5 });
  });

  it("is shared by runs of different length", () => {
    const trace = traceOf(transcriptOf([0.5]), X);
    expect([...spread(trace, { from: -2, to: 3 })]).toEqual([NaN, NaN, 0.5, NaN, NaN]);
    const whole = traceOf(transcriptOf([0.5, 0.6]), X);
    expect(spread(whole, { from: 0, to: 2 })).toBe(whole.values);
  });
});

describe("the difference of two runs", () => {
  it("is computed token by token from the start of the answers", () => {
    const a = traceOf(transcriptOf([0.25, 0.5, 0.75], [0.1, 0.1]), X);
    const b = traceOf(transcriptOf([0.5, null], [0.2]), X);
    const found = difference(a, b);
    expect(found.start).toBe(-1);
    expect([...found.values]).toEqual([0.1, 0.25, NaN]);
    expect(found.domain).toMatchObject({ low: -1, high: 1, neutral: 0 });
  });
});

describe("the matrix", () => {
  it("has a cell for each token and none where a score is missing", () => {
    const pixels = pixelsOf([traceOf(transcriptOf([0, null, 1]), X)], { from: 0, to: 3 }, 100, LUT);
    expect([pixels.width, pixels.height, pixels.perColumn]).toEqual([3, 1, 1]);
    expect([...pixels.data]).toEqual([1, 0, 256]);
  });

  it("shows the highest of the tokens that share a column, and loses none", () => {
    const scores = Array.from({ length: 1000 }, () => 0);
    scores[777] = 1;
    const pixels = pixelsOf([traceOf(transcriptOf(scores), X)], { from: 0, to: 1000 }, 10, LUT);
    expect(pixels.width).toBe(10);
    expect(pixels.perColumn).toBe(100);
    expect([...pixels.data].indexOf(256)).toBe(7);
  });

  it("shows the requested range", () => {
    const pixels = pixelsOf([traceOf(transcriptOf([0, 1, 0, 0]), X)], { from: 1, to: 3 }, 100, LUT);
    expect([...pixels.data]).toEqual([256, 1]);
  });

  it("has no highest value where there are no scores", () => {
    expect(highest(Float64Array.of(NaN, NaN), 0, 2)).toBeNaN();
    expect(highest(Float64Array.of(NaN, -3, NaN, -7), 0, 4)).toBe(-3);
    expect(highest(Float64Array.of(1), 5, 9)).toBeNaN();
  });
});

describe("a line of the chart", () => {
  function drawn(values: number[], perToken: number): string[] {
    const said: string[] = [];
    const note = (name: string) => (x: number, y: number, w?: number, h?: number) =>
      said.push(`${name} ${[x, y, w, h].filter((number) => number !== undefined).join(" ")}`);
    const nothing = () => undefined;
    const surface = {
      strokeStyle: "",
      fillStyle: "",
      lineWidth: 0,
      beginPath: nothing,
      stroke: nothing,
      setLineDash: nothing,
      moveTo: note("move"),
      lineTo: note("line"),
      fillRect: note("bar"),
    };
    const line = {
      values: Float64Array.from(values),
      first: 0,
      last: values.length - 1,
      toX: (i: number) => i * perToken,
      toY: (value: number) => 100 - value,
    };
    drawLine(surface, line, { colour: "red", width: 2, dash: [] });
    return said;
  }

  it("leaves a gap where a score is missing", () => {
    expect(drawn([10, 20, NaN, 30, 40], 10)).toEqual([
      "move -1 90",
      "line 0 90",
      "line 10 80",
      "move 29 70",
      "line 30 70",
      "line 40 60",
    ]);
  });

  it("is a bar from highest to lowest where tokens share a pixel, joined to the one before", () => {
    expect(drawn([10, 50, 30, 20, 20, 90], 0.5)).toEqual(["bar 0 49 2 42", "bar 1 49 2 32", "bar 2 9 2 72"]);
  });

  it("is not joined across a missing score there either", () => {
    expect(drawn([10, 10, NaN, 90], 0.5)).toEqual(["bar 0 89 2 2", "bar 1 9 2 2"]);
  });

  it("draws nothing without scores", () => {
    expect(drawn([NaN, NaN, NaN], 0.5)).toEqual([]);
    expect(drawn([NaN, NaN, NaN], 10)).toEqual([]);
  });
});

it("lines share an axis only where their ranges are the same", () => {
  const transcript = transcriptOf([0.1]);
  const logit = traceOf(transcript, probe("x", { activation: "none", calibration: [-4, 4] }));
  expect(
    isCommon([traceOf(transcript, X), traceOf(transcript, probe("x", { calibration: [0.2, 0.9] }))]),
  ).toBe(true);
  expect(isCommon([traceOf(transcript, X), logit])).toBe(false);
});

describe("the classes of a token", () => {
  const transcript = transcriptOf([0, 0.5, 1, null]);
  transcript.apply(token(4, "late"));
  const classes = tokenClasses(transcript, X);

  it("say its colour, and whether it is over the threshold", () => {
    expect([classes(0), classes(1), classes(2)]).toEqual([" b0", " b16 over", " b32 over"]);
  });

  it("distinguish a missing score from one that has not arrived", () => {
    expect([classes(3), classes(4)]).toEqual([" none", " wait"]);
  });

  it("are empty without a probe", () => {
    expect(tokenClasses(transcript, null)(0)).toBe("");
  });
});

describe("a value's rank in the reference", () => {
  const histogram = { low: 0, high: 4, counts: [10, 20, 30, 40] };
  it.each([
    [-1, 0],
    [0, 0],
    [1, 0.1],
    [1.5, 0.2],
    [4, 1],
    [9, 1],
  ])("of %d is %d", (value, rank) => {
    expect(rankOf(histogram, value)).toBeCloseTo(rank, 12);
  });
  it("of an empty reference is 0", () => {
    expect(rankOf({ low: 0, high: 1, counts: [0, 0] }, 0.5)).toBe(0);
  });
});

describe("the tooltip", () => {
  const view = { width: 1000, height: 600 };
  const tip = { width: 200, height: 150 };
  const rect = (left: number, top: number) => ({ left, top, right: left + 40, bottom: top + 20 }) as DOMRect;

  it("is below its token, or above if there is no room", () => {
    expect(placeTip(rect(100, 100), tip, view)).toEqual({ left: 88, top: 128 });
    expect(placeTip(rect(100, 500), tip, view)).toEqual({ left: 88, top: 342 });
  });

  it("never leaves the window", () => {
    expect(placeTip(rect(990, 100), tip, view).left).toBe(792);
    expect(placeTip(rect(-50, 20), { width: 200, height: 590 }, view)).toEqual({ left: 8, top: 8 });
    expect(placeTip(null, tip, view)).toEqual({ left: 792, top: 8 });
  });
});

describe("the list of probes", () => {
  const bank = [
    probe("b", { point: "post_block.20" }),
    probe("a", { point: "pre_attn.3", description: "Finds code" }),
    probe("c", { point: "post_block.3" }),
  ];

  it("is sorted by layer, then by name", () => {
    expect(ordered(bank).map(({ name }) => name)).toEqual(["a", "c", "b"]);
    expect(grouped(bank).map(({ layer, probes }) => [layer, probes.length])).toEqual([
      [3, 2],
      [20, 1],
    ]);
  });

  it("is searched in names, descriptions and points, every word of the search", () => {
    expect(matching(bank, "CODE").map(({ name }) => name)).toEqual(["a"]);
    expect(matching(bank, "block 20").map(({ name }) => name)).toEqual(["b"]);
    expect(matching(bank, " ")).toHaveLength(3);
    expect(matching(bank, "zebra")).toEqual([]);
  });
});
