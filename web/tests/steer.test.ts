import { describe, expect, it } from "vitest";
import type { components } from "../src/api/schema";
import type { VectorInfo } from "../src/api/steering";
import { rangesOf, rangesText } from "../src/data/ranges";
import {
  draftOf,
  entriesOf,
  faultsOf,
  freshEntry,
  gatable,
  gateProbe,
  nextId,
  reachOf,
  stepOf,
  withOp,
  type EntryDraft,
  type GateDraft,
  type Catalog,
} from "../src/data/entryDraft";
import { requestsOf, bodyOf, draftFaults, PAIR_SEED } from "../src/state/request";
import { EMPTY } from "../src/state/store";
import type { Draft } from "../src/state/types";
import { probe } from "./wire";

const JOY: VectorInfo = {
  name: "joy",
  points: ["post_block.10", "post_block.15"],
  width: 8,
  digest: "ab12",
  norms: [1, 2],
  description: "more of it",
  method: null,
  scale: 4,
};
const CATALOG: Catalog = {
  vectors: [JOY],
  points: ["post_block.10", "post_block.15", "pre_attn.11"],
  probes: [
    probe("early", { point: "pre_attn.11" }),
    probe("late", { point: "post_block.15" }),
    probe("bare", { point: "post_block.2", threshold: null }),
  ],
};
const GATE: GateDraft = {
  probe: "early",
  threshold: null,
  sharpness: null,
  isLatched: false,
  release: null,
};

const entry = (change: Partial<EntryDraft> = {}): EntryDraft => ({ ...freshEntry(1, JOY), ...change });
const sentOf = (change: Partial<EntryDraft>) => entriesOf([entry(change)])[0];
const faults = (change: Partial<EntryDraft>) => faultsOf(entry(change), CATALOG).join(" ");

describe("an entry of the panel", () => {
  it("starts at the vector's suggested scale", () => {
    expect(entriesOf([entry()])).toEqual([{ vector: "joy", scale: 4, op: "add" }]);
    expect(nextId([entry({ id: 7 }), entry()])).toBe(8);
  });

  it("is not sent at scale 0", () => {
    expect(entriesOf([entry({ scale: 0 }), entry({ scale: -0.5 })])).toEqual([
      { vector: "joy", scale: -0.5, op: "add" },
    ]);
  });

  it("sends all that is set, and nothing that its operation does not know", () => {
    expect(
      sentOf({
        op: "clamp",
        isMatched: true,
        low: -1,
        high: 2.5,
        points: ["post_block.15"],
        phase: "prompt",
        positions: "0:4, -3:",
        skipsSpecial: true,
        gate: { probe: "early", threshold: 0.25, sharpness: null, isLatched: false, release: 0.1 },
      }),
    ).toEqual({
      vector: "joy",
      scale: 4,
      op: "clamp",
      low: -1,
      high: 2.5,
      points: ["post_block.15"],
      when: {
        phase: "prompt",
        positions: [
          [0, 4],
          [-3, null],
        ],
        skip_special: true,
      },
      gate: { probe: "early", threshold: 0.25, release: 0.1 },
    });
    expect(sentOf({ isMatched: true, low: 1 })).toEqual({
      vector: "joy",
      scale: 4,
      op: "add",
      match_norm: true,
    });
  });

  it("sends when as a string where possible", () => {
    expect(sentOf({ phase: "generation" })?.when).toBe("generation");
    expect(sentOf({ phase: "last_prompt", positions: "3:" })?.when).toBe("last_prompt");
    expect(sentOf({ skipsSpecial: true })?.when).toEqual({ phase: "both", skip_special: true });
  });

  it("sends no release with a gate that is soft or latched", () => {
    expect(sentOf({ gate: { ...GATE, isLatched: true, release: 0.2 } })?.gate).toEqual({
      probe: "early",
      latch: true,
    });
    expect(sentOf({ gate: { ...GATE, sharpness: 8, release: 0.2 } })?.gate).toEqual({
      probe: "early",
      sharpness: 8,
    });
  });

  it("is read back from what was sent", () => {
    const set = entry({
      op: "ablate",
      scale: -1.5,
      points: ["post_block.10"],
      phase: "both",
      positions: "2:5",
      gate: { ...GATE, sharpness: 3 },
    });
    const [sent] = entriesOf([set]);
    expect(draftOf(1, JSON.parse(JSON.stringify(sent)))).toEqual(set);
  });

  it.each([
    null,
    3,
    {},
    { vector: "joy" },
    { vector: 1, scale: 1, op: "add" },
    { vector: "joy", scale: 1, op: "x" },
  ])("that is none is not read: %j", (found) => {
    expect(draftOf(1, found)).toBeNull();
  });

  it("changes the operation with its default scale, keeping the sign", () => {
    expect(withOp(entry(), "ablate", false, 4)).toMatchObject({ op: "ablate", scale: 1 });
    expect(withOp(entry({ scale: -8 }), "add", true, 4)).toMatchObject({ isMatched: true, scale: -0.25 });
    expect(withOp(entry({ scale: 9 }), "add", false, 4).scale).toBe(9);
  });

  it("has a slider to both sides of 0, by the suggested scale", () => {
    expect(reachOf(entry(), 4)).toBe(12);
    expect(reachOf(entry(), -4)).toBe(12);
    expect(reachOf(entry({ isMatched: true }), 4)).toBe(1);
    expect(reachOf(entry({ op: "ablate" }), 4)).toBe(2);
    expect(reachOf(entry(), 0)).toBe(1);
    expect([stepOf(12), stepOf(1), stepOf(0.03)]).toEqual([0.1, 0.01, 0.0001]);
  });
});

describe("the faults of an entry are listed", () => {
  it.each<[string, Partial<EntryDraft>, string]>([
    ["a vector that was removed", { vector: "sorrow" }, "no longer has the vector sorrow"],
    ["no scale", { scale: null }, "Set a scale"],
    ["no point", { points: [] }, "at least one point"],
    ["a point that is not tapped", { points: ["post_block.3"] }, "post_block.3 is not tapped"],
    ["a clamp without bounds", { op: "clamp" }, "needs a low or a high"],
    ["bounds the wrong way round", { op: "clamp", low: 2, high: 1 }, "above the high bound"],
    ["positions that are none", { positions: "x" }, "positions are written as"],
    ["a gate without a probe", { gate: { ...GATE, probe: "" } }, "Choose the gate's probe"],
    ["a gate without a threshold", { gate: { ...GATE, probe: "bare" } }, "set one"],
    ["a gate on a later point", { gate: { ...GATE, probe: "late" } }, "only after post_block.10"],
    ["a sharpness of 0", { gate: { ...GATE, sharpness: 0 } }, "above 0"],
    ["a release over the threshold", { gate: { ...GATE, release: 0.6 } }, "at or below"],
  ])("%s", (_, change, words) => {
    expect(faults(change)).toContain(words);
  });

  it("and are none for a valid entry: a gate may read the same point", () => {
    expect(faults({})).toBe("");
    expect(faults({ gate: GATE })).toBe("");
    expect(faults({ points: ["post_block.15"], gate: { ...GATE, probe: "late", release: 0.5 } })).toBe("");
    expect(faults({ op: "clamp", high: 0 })).toBe("");
  });
});

type Sent<T> = T extends (infer Each)[]
  ? Sent<Each>[]
  : T extends object
    ? { [K in keyof T]?: Sent<T[K]> }
    : T;

it("the fields that are sent are in the server's schema", () => {
  const entries: Sent<components["schemas"]["SteerEntry"]>[] = entriesOf([entry({ gate: GATE })]);
  expect(entries[0]?.gate?.probe).toBe("early");
});

describe("a gate is offered", () => {
  const [early, late] = CATALOG.probes;

  it("the probe that is looked at, where its score is known in time", () => {
    expect(gateProbe(CATALOG.probes, "late", ["post_block.10", "post_block.15"])).toBe("late");
    expect(gateProbe(CATALOG.probes, "late", ["post_block.10"])).toBe("bare");
    expect(gateProbe([], "late", ["post_block.10"])).toBe("");
  });

  it("and the points at which it can act", () => {
    expect(gatable(late, ["post_block.10", "post_block.15"])).toEqual(["post_block.15"]);
    expect(gatable(early, ["post_block.10", "post_block.15"])).toHaveLength(2);
    expect(gatable(undefined, ["post_block.10"])).toEqual([]);
  });
});

describe("positions", () => {
  it("are ranges and single positions", () => {
    expect(rangesOf(" 0:4, -3:,7 ,-2", "both").ranges).toEqual([
      [0, 4],
      [-3, null],
      [7, 8],
      [-2, -1],
    ]);
    expect(rangesOf("", "prompt")).toEqual({ ranges: [], fault: null });
    expect(
      rangesText([
        [0, 4],
        [-3, null],
      ]),
    ).toBe("0:4, -3:");
  });

  it.each(["4:4", "4:2", "-1:-3", "-3:0", "-1", "a:b", "1-2", "1:2:3"])("%s is refused", (text) => {
    expect(rangesOf(text, "both").fault).toContain(text);
  });

  it("cannot count back from an answer's end", () => {
    expect(rangesOf("-2:", "generation").fault).toContain("cannot count back");
    expect(rangesOf("0:8", "generation").fault).toBeNull();
  });
});

describe("a question", () => {
  const draft: Draft = { ...EMPTY.draft, entries: [entry()], rules: [] };

  it("asked with and without steering is two requests that differ only in steering", () => {
    const [plain, steered] = requestsOf(draft, true).map((asked) => bodyOf({ model: "m", ...asked }, []));
    expect(steered?.clairai.steer).toEqual([{ vector: "joy", scale: 4, op: "add" }]);
    const { steer, ...rest } = steered?.clairai ?? {};
    expect(steer).toHaveLength(1);
    expect(plain).toEqual({ ...steered, clairai: rest });
    expect(plain?.seed).toBe(PAIR_SEED);
  });

  it("keeps a seed that was set, and its stop rules in both", () => {
    const rules = [{ id: 1, probe: "early", threshold: null, tokens: 2, action: "stop" as const }];
    const asks = requestsOf({ ...draft, rules, sampling: { ...draft.sampling, seed: 7 } }, true);
    expect(asks.map(({ sampling }) => sampling.seed)).toEqual([7, 7]);
    expect(asks.map(({ stop }) => stop.length)).toEqual([1, 1]);
  });

  it("is one request without steering, or if no comparison is wanted", () => {
    expect(requestsOf(draft, false)).toHaveLength(1);
    expect(requestsOf({ ...draft, entries: [entry({ scale: 0 })] }, true)).toHaveLength(1);
    expect(requestsOf(draft, false)[0]?.sampling.seed).toBeNull();
  });

  it("is not sent if it steers an engine without steering", () => {
    const probes = [...CATALOG.probes];
    const on = {
      kind: "on" as const,
      vectors: [JOY],
      points: [...CATALOG.points],
      tiers: { base: [], prefill: [], decode: [] },
    };
    expect(draftFaults({ draft, probes, steering: on })).toEqual([]);
    expect(draftFaults({ draft, probes, steering: { kind: "off", reason: null } })).toHaveLength(1);
  });
});
