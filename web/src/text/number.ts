// Formats numbers for the page.

/** A score with enough digits to tell close ones apart; a dash if there is none. */
export function score(value: number): string {
  if (Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 0.0005 || size >= 100_000) return tidy(value.toExponential(2));
  if (size >= 1000) return tidy(value.toFixed(1));
  return tidy(size >= 10 ? value.toFixed(3) : value.toFixed(4));
}

export function signed(value: number): string {
  return value > 0 ? `+${score(value)}` : score(value);
}

/** For axes and legends. */
export function brief(value: number): string {
  const size = Math.abs(value);
  if (size !== 0 && size < 0.005) return tidy(size < 0.0005 ? value.toExponential(0) : value.toFixed(3));
  return tidy(value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2));
}

/** A number that the user set, to six digits; "?" for an empty field. */
export function exact(value: number): string {
  return Number.isNaN(value) ? "?" : tidy(String(Number(value.toPrecision(6))));
}

export function count(value: number): string {
  return value.toLocaleString("en-US");
}

export function counted(value: number, noun: string): string {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

const WORDS = [
  "no",
  "one",
  "two",
  "three",
  "four",
  "five",
  "six",
  "seven",
  "eight",
  "nine",
  "ten",
  "eleven",
  "twelve",
];

/** For running text: small numbers as words. */
export function inWords(value: number): string {
  return WORDS[value] ?? count(value);
}

// A minus sign is as wide as a digit, unlike a hyphen, and keeps columns aligned.
function tidy(text: string): string {
  return text.replaceAll("-", "\u2212");
}
