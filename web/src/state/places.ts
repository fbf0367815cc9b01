// Takes the token lists on the page; gives where a token of a run stands, and brings it into view.
import type { Focus } from "./types";

/** A list of tokens that is on the page now. */
export interface Place {
  rectOf(focus: Focus): DOMRect | null;
  /** Show the token, opening what hides it; false if it is not in this list. */
  reveal(focus: Focus): boolean;
}

export class Places {
  #places = new Map<string, Set<Place>>();

  add(run: string, place: Place): () => void {
    const places = this.#places.get(run) ?? new Set();
    this.#places.set(run, places);
    places.add(place);
    return () => void places.delete(place);
  }

  rectOf(focus: Focus): DOMRect | null {
    for (const place of this.#places.get(focus.run) ?? []) {
      const rect = place.rectOf(focus);
      if (rect) return rect;
    }
    return null;
  }

  reveal(focus: Focus): void {
    for (const place of this.#places.get(focus.run) ?? []) {
      if (place.reveal(focus)) return;
    }
  }
}
