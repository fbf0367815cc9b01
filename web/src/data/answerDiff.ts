// Compares two answers token by token and finds the tokens that only one of them has.
import { diffArrays } from "diff";
import type { Transcript } from "./transcript";

export interface AnswerDiff {
  a: ReadonlySet<number>;
  b: ReadonlySet<number>;
}

export interface Answer {
  ids: readonly number[];
  /** More tokens may come, so tokens of the other answer past this one's end are not compared yet. */
  isGrowing: boolean;
}

/** With more edits the answers have little in common, and aligning them would drop frames. */
const MAX_EDITS = 600;

export function diffAnswers(a: Answer, b: Answer): AnswerDiff {
  const changes = diffArrays([...a.ids], [...b.ids], { maxEditLength: MAX_EDITS });
  const marks = { a: new Set<number>(), b: new Set<number>() };
  if (!changes) return fromFirstDifference(a, b);
  let [i, j] = [0, 0];
  let [lastA, lastB] = [0, 0];
  for (const { added, removed, count } of changes) {
    if (removed) for (let end = i + count; i < end; i += 1) marks.a.add(i);
    else if (added) for (let end = j + count; j < end; j += 1) marks.b.add(j);
    else [lastA, lastB] = [(i += count), (j += count)];
  }
  if (b.isGrowing) unmark(marks.a, Math.max(lastA, b.ids.length));
  if (a.isGrowing) unmark(marks.b, Math.max(lastB, a.ids.length));
  return marks;
}

function unmark(marks: Set<number>, from: number): void {
  for (const index of marks) if (index >= from) marks.delete(index);
}

function fromFirstDifference(a: Answer, b: Answer): AnswerDiff {
  let first = 0;
  while (first < a.ids.length && first < b.ids.length && a.ids[first] === b.ids[first]) first += 1;
  const after = (answer: Answer) =>
    new Set(Array.from({ length: answer.ids.length - first }, (_, i) => first + i));
  return { a: after(a), b: after(b) };
}

/** Caches the last diff: both sides of a comparison ask for the same one. */
export class DiffCache {
  #key = "";
  #marks: AnswerDiff = { a: new Set(), b: new Set() };

  of(a: Transcript, b: Transcript, isGrowing: readonly [boolean, boolean]): AnswerDiff {
    const key = `${a.version} ${b.version} ${isGrowing.join(" ")}`;
    if (key === this.#key) return this.#marks;
    this.#key = key;
    this.#marks = diffAnswers(
      { ids: a.ids.slice(a.promptLength), isGrowing: isGrowing[0] },
      { ids: b.ids.slice(b.promptLength), isGrowing: isGrowing[1] },
    );
    return this.#marks;
  }
}
