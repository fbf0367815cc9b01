import { describe, expect, it } from "vitest";
import { domainOf, fraction, position } from "../src/colour/domain";
import { lineStyle } from "../src/colour/lines";
import { bucketOf, contrast, lookup, NEUTRAL_BUCKET, NUM_BUCKETS, PAPER, swatch } from "../src/colour/ramp";
import { bucketRules } from "../src/colour/sheet";
import { probe } from "./wire";

const THEMES = ["light", "dark"] as const;

describe("the range of a probe's colours", () => {
  it("is its calibration, neutral at the threshold", () => {
    const domain = domainOf(probe("x", { calibration: [0.02, 0.8], threshold: 0.4 }));
    expect(domain).toEqual({ low: 0.02, high: 0.8, neutral: 0.4, isDiverging: true, source: "calibration" });
  });

  it("is widened where the calibration leaves the threshold no room above", () => {
    const domain = domainOf(probe("x", { calibration: [0.001, 0.18], threshold: 0.3 }));
    expect([domain.low, domain.neutral, domain.high]).toEqual([0.001, 0.3, 1]);
    const logit = domainOf(probe("x", { activation: "none", calibration: [-2, 1], threshold: 3 }));
    expect([logit.low, logit.neutral, logit.high]).toEqual([-2, 3, 8]);
  });

  it("is widened where the calibration leaves the threshold no room below", () => {
    const domain = domainOf(probe("x", { activation: "none", calibration: [2, 6], threshold: 1 }));
    expect([domain.low, domain.neutral, domain.high]).toEqual([-4, 1, 6]);
  });

  it("diverges around zero for a projection without a threshold, and rises from its low end otherwise", () => {
    const signed = domainOf(probe("x", { activation: "none", calibration: [-3, 5], threshold: null }));
    expect([signed.neutral, signed.isDiverging]).toEqual([0, true]);
    const unsigned = domainOf(probe("x", { activation: "relu", calibration: [0, 5], threshold: null }));
    expect([unsigned.neutral, unsigned.isDiverging]).toEqual([0, false]);
  });

  it("says where it comes from when there is no calibration", () => {
    expect(domainOf(probe("x", { calibration: null })).source).toBe("activation");
    expect(domainOf(probe("x", { calibration: null, activation: "none" })).source).toBe("assumed");
  });

  it("does not depend on the shown scores: the same value always has the same colour", () => {
    const domain = domainOf(probe("x"));
    const before = position(domain, 0.73);
    position(domain, 900);
    expect(position(domain, 0.73)).toBe(before);
  });

  it.each([
    [-5, 0],
    [0, 0],
    [0.25, 0.25],
    [0.5, 0.5],
    [0.75, 0.75],
    [1, 1],
    [7, 1],
  ])("puts %d at %d of the ramp", (value, expected) => {
    expect(position(domainOf(probe("x")), value)).toBeCloseTo(expected, 12);
  });

  it("puts the threshold in the middle however skewed the range is", () => {
    const domain = domainOf(probe("x", { calibration: [0, 1], threshold: 0.1 }));
    expect(position(domain, 0.1)).toBe(0.5);
    expect(fraction(domain, 0.1)).toBeCloseTo(0.1);
  });
});

describe.each(THEMES)("the %s ramp", (theme) => {
  it("has a readable text colour for every class of token", () => {
    for (let bucket = 0; bucket < NUM_BUCKETS; bucket += 1) {
      const { fill, ink } = swatch(theme, bucket / (NUM_BUCKETS - 1));
      expect(contrast(fill, ink), `class ${bucket}`).toBeGreaterThanOrEqual(4.5);
    }
  });

  it("is the background colour at the threshold, and differs from it at either end", () => {
    expect(contrast(swatch(theme, 0.5).fill, PAPER[theme])).toBeLessThan(1.05);
    expect(contrast(swatch(theme, 1).fill, PAPER[theme])).toBeGreaterThan(1.9);
    expect(swatch(theme, 0).fill).not.toBe(swatch(theme, 1).fill);
  });

  it("is the same on canvases as on tokens", () => {
    const lut = lookup(theme);
    const packed = lut[255] ?? 0;
    const hex = [packed & 255, (packed >> 8) & 255, (packed >> 16) & 255]
      .map((channel) => channel.toString(16).padStart(2, "0"))
      .join("");
    expect(`#${hex}`).toBe(swatch(theme, 1).fill);
    expect(packed >>> 24).toBe(255);
  });

  it("has a class for every score, with its own rule", () => {
    expect(bucketOf(0)).toBe(0);
    expect(bucketOf(0.5)).toBe(NEUTRAL_BUCKET);
    expect(bucketOf(1)).toBe(NUM_BUCKETS - 1);
    expect(bucketRules()).toContain(`[data-theme="${theme}"] .b${NUM_BUCKETS - 1}{background-color:#`);
  });

  it("has eight visible and distinct lines", () => {
    const styles = Array.from({ length: 8 }, (_, slot) => lineStyle(theme, slot));
    for (const { colour } of styles) expect(contrast(colour, PAPER[theme])).toBeGreaterThanOrEqual(3);
    expect(new Set(styles.map(({ colour, dash }) => `${colour}${dash.join()}`)).size).toBe(8);
  });
});
