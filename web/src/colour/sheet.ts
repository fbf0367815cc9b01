// The style sheet of the token classes, generated from the colour ramp.
import { NUM_BUCKETS, swatch, type Theme } from "./ramp";

/** Rules for `.b0` to `.b32`, for each theme. */
export function bucketRules(): string {
  const themes: readonly Theme[] = ["light", "dark"];
  return themes.flatMap((theme) => rulesOf(theme)).join("\n");
}

function rulesOf(theme: Theme): string[] {
  return Array.from({ length: NUM_BUCKETS }, (_, bucket) => {
    const { fill, ink } = swatch(theme, bucket / (NUM_BUCKETS - 1));
    return `[data-theme="${theme}"] .b${bucket}{background-color:${fill};color:${ink}}`;
  });
}

/** A constructed style sheet needs no inline style, which the page's policy forbids. */
export function adoptBuckets(target: Document): void {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(bucketRules());
  target.adoptedStyleSheets = [...target.adoptedStyleSheets, sheet];
}
