// Takes a run; gives chart and matrix one way to hover, pin, zoom and know the marked token.
import { useCallback, useMemo } from "react";
import { hover, pin, shownFocus } from "../../state/focus";
import { usePage } from "../../state/page";
import type { Focus } from "../../state/types";
import type { CellPointing } from "./Cells";
import type { Pointing } from "./plot";

/** Tokens here count from the answer's first; see traces.ts. */
export function usePointing(run: string | null, onRow: (row: number) => void) {
  const page = usePage();
  const target = useCallback(
    (token: number | null): Focus | null => {
      if (run === null || token === null) return null;
      const spot =
        token < 0
          ? { part: "prompt" as const, index: token + page.shelf.get(run).promptLength }
          : { part: "answer" as const, index: token };
      return page.shelf.get(run).has(spot) ? { run, spot } : null;
    },
    [page, run],
  );
  const marked = useCallback((): number | null => {
    const focus = shownFocus(page.focus.getState());
    if (!focus || run === null) return null;
    const { head, versus } = page.store.getState();
    const isHere = focus.run === run || (versus !== null && [head, versus].includes(focus.run));
    if (!isHere) return null;
    const { part, index } = focus.spot;
    return part === "answer" ? index : index - page.shelf.get(focus.run).promptLength;
  }, [page, run]);
  const pointing = useMemo((): Pointing => {
    return {
      hover: (token, { clientX, clientY }) => hover(page.focus, target(token), { x: clientX, y: clientY }),
      pin: (token, { clientX, clientY }) => {
        const focus = target(token);
        pin(page.focus, focus, { x: clientX, y: clientY });
        if (focus) page.places.reveal(focus);
      },
      zoom: (span) => page.store.setState({ span }),
    };
  }, [page, target]);
  const cells = useMemo((): CellPointing => {
    return {
      hover: (token, _, event) => pointing.hover(token, event),
      pin: (token, row, event) => {
        onRow(row);
        pointing.pin(token, event);
      },
    };
  }, [pointing, onRow]);
  return { pointing, cells, marked };
}
