// The colour ramp of scores in each theme, with a readable text colour for every step.
import { lab, rgb } from "d3-color";
import { interpolateLab } from "d3-interpolate";
import { interpolatePuOr } from "d3-scale-chromatic";

export type Theme = "light" | "dark";

export interface Swatch {
  fill: string;
  ink: string;
}

/** The number of colour classes: few, so that another probe only changes class names. */
export const NUM_BUCKETS = 33;
export const NEUTRAL_BUCKET = 16;
const LUT_SIZE = 256;
const LEAST_CONTRAST = 4.6;

export const PAPER: Record<Theme, string> = { light: "#fbfbf9", dark: "#141518" };
const INKS: Record<Theme, { dark: string; light: string }> = {
  light: { dark: "#17181b", light: "#ffffff" },
  dark: { dark: "#0d0e10", light: "#ecebe7" },
};
/** How strong the cool side gets: most tokens lie there and must stay unobtrusive. */
const COOL_REACH: Record<Theme, number> = { light: 0.27, dark: 0.42 };

/** The colour at `position`: 0 low, 0.5 neutral, 1 high (see domain.ts). */
export function colourAt(theme: Theme, position: number): string {
  const side = Math.abs(position - 0.5) * 2;
  const isWarm = position >= 0.5;
  if (theme === "light") {
    // PuOr runs from purple (0) through white to orange (1); its last brown is too dark for a high score.
    const reach = isWarm ? 0.5 + 0.31 * side : 0.5 - 0.5 * COOL_REACH.light * side;
    const tint = rgb(interpolatePuOr(reach)).formatHex();
    return interpolateLab(PAPER.light, tint)(Math.min(1, side * 4));
  }
  const end = isWarm ? "#f39a3e" : interpolatePuOr(0.2);
  return interpolateLab(PAPER.dark, end)(isWarm ? side : side * COOL_REACH.dark);
}

export function swatch(theme: Theme, position: number): Swatch {
  const fill = rgb(colourAt(theme, position)).formatHex();
  return { fill, ink: inkOn(theme, fill) };
}

/** The theme's text colour with more contrast; black or white if neither has enough. */
export function inkOn(theme: Theme, fill: string): string {
  const { dark, light } = INKS[theme];
  const ink = contrast(fill, dark) >= contrast(fill, light) ? dark : light;
  if (contrast(fill, ink) >= LEAST_CONTRAST) return ink;
  return contrast(fill, "#000000") >= contrast(fill, "#ffffff") ? "#000000" : "#ffffff";
}

/** WCAG's contrast ratio, 1 to 21. */
export function contrast(a: string, b: string): number {
  const [x, y] = [luminance(a), luminance(b)];
  return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
}

function luminance(colour: string): number {
  const { r, g, b } = rgb(colour);
  const [x, y, z] = [r, g, b].map((channel) => {
    const part = channel / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  }) as [number, number, number];
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
}

/** The ramp as packed pixels (little-endian RGBA), for canvases. */
export function lookup(theme: Theme): Uint32Array {
  return Uint32Array.from({ length: LUT_SIZE }, (_, i) => {
    const { r, g, b } = rgb(colourAt(theme, i / (LUT_SIZE - 1)));
    return ((255 << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r)) >>> 0;
  });
}

export function bucketOf(position: number): number {
  return Math.round(position * (NUM_BUCKETS - 1));
}

/** The colour made light or dark enough to be seen on the theme's background. */
export function readable(theme: Theme, colour: string): string {
  const tone = lab(colour);
  tone.l = theme === "light" ? Math.min(tone.l, 52) : Math.max(tone.l, 66);
  return tone.formatHex();
}
