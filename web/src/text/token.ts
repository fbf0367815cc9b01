// Shows a token's text so that white space, special tokens and fragments are visible.

export type TokenKind = "plain" | "special" | "fragment" | "newline" | "space";

const SPECIAL =
  /^(<\|[^|]*\|>|<\/?(s|bos|eos|pad|unk|mask|start_of_turn|end_of_turn)>|\[\/?(INST|PAD|CLS|SEP|BOS|EOS)\])$/;

export function kindOf(text: string): TokenKind {
  if (text === "") return "fragment";
  if (text.includes("\n")) return "newline";
  if (/^\s+$/.test(text)) return "space";
  return SPECIAL.test(text) ? "special" : "plain";
}

/** The token on one line with everything visible, for tooltips and lists. */
export function visible(text: string): string {
  if (text === "") return "(part of a character)";
  return text
    .replaceAll("\n", "↵")
    .replaceAll("\t", "→")
    .replaceAll(" ", "·")
    .replace(/[\p{Cc}\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/gu, escaped);
}

/** Control and direction characters would be invisible, or reverse the text. */
function escaped(character: string): string {
  return `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`;
}

/** The token's text for the page; only control and direction characters are replaced. */
export function shown(text: string): string {
  return text.replace(/(?![\n\t])\p{Cc}|[\u202a-\u202e\u2066-\u2069]/gu, escaped);
}

/** Visible marks for a token's leading white space, one per character. */
export function leadOf(text: string): string {
  const lead = /^[ \t]+/.exec(text)?.[0] ?? "";
  return lead.replaceAll(" ", "·").replaceAll("\t", "→");
}

/** What a screen reader says. */
export function spoken(text: string): string {
  if (text === "") return "part of a character";
  if (/^ +$/.test(text)) return text.length === 1 ? "space" : `${text.length} spaces`;
  const plain = text.replaceAll("\n", " new line ").replaceAll("\t", " tab ").trim();
  return plain === "" ? "white space" : plain;
}
