// Counts in the window's title the crossings that arrive while the page is hidden.
import { useEffect } from "react";
import { usePage } from "../state/page";

export function useTitle(): void {
  const page = usePage();
  useEffect(() => {
    let numMissed = 0;
    const name = () => {
      const { isFrozen, model } = page.store.getState();
      const title = isFrozen && model !== null ? `clairai: ${model}` : "clairai";
      document.title = numMissed > 0 ? `(${numMissed}) ${title}` : title;
    };
    const stop = page.store.subscribe((state, before) => {
      if (!document.hidden || state.numUnseen <= before.numUnseen) return;
      numMissed += state.numUnseen - before.numUnseen;
      name();
    });
    const seen = () => {
      if (document.hidden) return;
      numMissed = 0;
      name();
    };
    name();
    document.addEventListener("visibilitychange", seen);
    return () => {
      stop();
      document.removeEventListener("visibilitychange", seen);
    };
  }, [page]);
}
