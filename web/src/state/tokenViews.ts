// Finds where a token is shown on the page, and scrolls it into view.
import type { Focus } from "./types";

/** A list of tokens that is currently on the page. */
export interface TokenView {
  rectOf(focus: Focus): DOMRect | null;
  /** Scroll the token into view, opening what hides it; false if it is not in this list. */
  reveal(focus: Focus): boolean;
}

export class TokenViews {
  #views = new Map<string, Set<TokenView>>();

  add(run: string, view: TokenView): () => void {
    const views = this.#views.get(run) ?? new Set();
    this.#views.set(run, views);
    views.add(view);
    return () => void views.delete(view);
  }

  rectOf(focus: Focus): DOMRect | null {
    for (const view of this.#views.get(focus.run) ?? []) {
      const rect = view.rectOf(focus);
      if (rect) return rect;
    }
    return null;
  }

  reveal(focus: Focus): void {
    for (const view of this.#views.get(focus.run) ?? []) {
      if (view.reveal(focus)) return;
    }
  }
}
