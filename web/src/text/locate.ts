// Finds the tokens of the prompt that hold the user's own words.

/** First token, and one past the last. */
export type TokenRange = readonly [number, number];

/** The tokens that hold `user`; null if the chat template changed the words. */
export function locate(tokens: readonly string[], user: string): TokenRange | null {
  const wanted = user.trim();
  if (wanted === "") return null;
  const at = tokens.join("").lastIndexOf(wanted);
  if (at < 0) return null;
  return covering(tokens, at, at + wanted.length);
}

/** The tokens that hold characters `from` to `to`. */
function covering(tokens: readonly string[], from: number, to: number): TokenRange {
  let first = tokens.length;
  let end = 0;
  let offset = 0;
  for (const [i, token] of tokens.entries()) {
    const after = offset + token.length;
    if (first === tokens.length && after > from) first = i;
    if (offset < to) end = i + 1;
    offset = after;
  }
  return [first, end];
}
