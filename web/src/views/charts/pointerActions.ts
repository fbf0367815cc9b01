// Hovering, pinning and zooming, the same for the line chart and the matrix.
import { useCallback, useMemo } from "react";
import { hover, pin, shownFocus } from "../../state/focus";
import { usePage } from "../../state/page";
import type { Focus } from "../../state/types";
import type { CellPointerActions } from "./Cells";
import type { PointerActions } from "./plot";

/** Tokens are counted from the answer's first; see traces.ts. */
export function usePointerActions(run: string | null, onRow: (row: number) => void) {
  const page = usePage();
  const target = useCallback(
    (at: number | null): Focus | null => {
      if (run === null || at === null) return null;
      const token =
        at < 0
          ? { part: "prompt" as const, index: at + page.transcripts.get(run).promptLength }
          : { part: "answer" as const, index: at };
      return page.transcripts.get(run).has(token) ? { run, token } : null;
    },
    [page, run],
  );
  const marked = useCallback((): number | null => {
    const focus = shownFocus(page.focus.getState());
    if (!focus || run === null) return null;
    const { head, versus } = page.store.getState();
    const isHere = focus.run === run || (versus !== null && [head, versus].includes(focus.run));
    if (!isHere) return null;
    const { part, index } = focus.token;
    return part === "answer" ? index : index - page.transcripts.get(focus.run).promptLength;
  }, [page, run]);
  const pointer = useMemo((): PointerActions => {
    return {
      hover: (token, { clientX, clientY }) => hover(page.focus, target(token), { x: clientX, y: clientY }),
      pin: (token, { clientX, clientY }) => {
        const focus = target(token);
        pin(page.focus, focus, { x: clientX, y: clientY });
        if (focus) page.tokenViews.reveal(focus);
      },
      zoom: (span) => page.store.setState({ span }),
    };
  }, [page, target]);
  const cells = useMemo((): CellPointerActions => {
    return {
      hover: (token, _, event) => pointer.hover(token, event),
      pin: (token, row, event) => {
        onRow(row);
        pointer.pin(token, event);
      },
    };
  }, [pointer, onRow]);
  return { pointer, cells, marked };
}
