// React hooks that subscribe a component to the parts of the page it renders.
import { useCallback, useEffect, useState, useSyncExternalStore } from "react";
import { useStore } from "zustand";
import type { ProbeInfo } from "../api/types";
import type { Theme } from "../colour/ramp";
import { shownFocus } from "../state/focus";
import { usePage } from "../state/page";
import type { Focus, Run, State } from "../state/types";

export function useView<T>(selector: (state: State) => T): T {
  return useStore(usePage().store, selector);
}

/** Renders the component again, at most once a frame, while the run grows. */
export function useTranscriptVersion(run: string | null): number {
  const { transcripts } = usePage();
  const watch = useCallback(
    (notify: () => void) => (run === null ? () => undefined : transcripts.subscribe(run, notify)),
    [transcripts, run],
  );
  return useSyncExternalStore(watch, () => (run === null ? 0 : transcripts.get(run).version));
}

export function useShownFocus(): Focus | null {
  return useStore(usePage().focus, shownFocus);
}

export function useRun(id: string | null): Run | null {
  return useView((state) => (id === null ? null : (state.runs[id] ?? null)));
}

/** The probe as it was when the run began; its current version if the run does not have it. */
export function probeIn(
  run: Run | null,
  probes: readonly ProbeInfo[] | null,
  name: string | null,
): ProbeInfo | null {
  const isNamed = (probe: ProbeInfo) => probe.name === name;
  return run?.probes.find(isNamed) ?? probes?.find(isNamed) ?? null;
}

export function useTheme(): Theme {
  const choice = useView((state) => state.theme);
  const isDark = useMedia("(prefers-color-scheme: dark)");
  return choice === "system" ? (isDark ? "dark" : "light") : choice;
}

export function useMedia(query: string): boolean {
  const watch = useCallback(
    (notify: () => void) => {
      const list = matchMedia(query);
      list.addEventListener("change", notify);
      return () => list.removeEventListener("change", notify);
    },
    [query],
  );
  return useSyncExternalStore(watch, () => matchMedia(query).matches);
}

/** Whether one column is shown at a time; keep the width equal to the one in phone.css. */
export function isNarrow(): boolean {
  return matchMedia("(max-width: 1100px)").matches;
}

/** The width of an element in CSS pixels; 0 until it is known. */
export function useWidth(element: HTMLElement | null): number {
  const [width, setWidth] = useState(0);
  useEffect(() => {
    if (!element) return;
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry?.contentRect.width ?? 0)));
    observer.observe(element);
    return () => observer.disconnect();
  }, [element]);
  return width;
}
