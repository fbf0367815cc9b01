// The line chart of scores over tokens, kept up to date.
import { useEffect, useRef, useState } from "react";
import { usePage } from "../../state/page";
import { useTheme, useWidth } from "../hooks";
import { Plot, type Drawing, type PointerActions } from "./plot";

interface Props {
  /** Called again whenever the runs change. */
  drawing: () => Drawing;
  runs: readonly string[];
  height: number;
  label: string;
  pointer: PointerActions;
  /** The token to mark now; called whenever the focus moves. */
  marked: () => number | null;
}

export function Lines({ drawing, runs, height, label, pointer, marked }: Props) {
  const page = usePage();
  const theme = useTheme();
  const [host, setHost] = useState<HTMLDivElement | null>(null);
  const plot = useRef<Plot | null>(null);
  const width = useWidth(host);
  const latest = useRef(pointer);
  useEffect(() => {
    latest.current = pointer;
  });
  useEffect(() => {
    if (!host) return;
    plot.current = new Plot(host, {
      hover: (token, event) => latest.current.hover(token, event),
      pin: (token, event) => latest.current.pin(token, event),
      zoom: (span) => latest.current.zoom(span),
    });
    return () => plot.current?.destroy();
  }, [host]);
  const names = runs.join(" ");
  useEffect(() => {
    const draw = () => {
      plot.current?.draw(drawing(), width, height, theme);
      plot.current?.point(marked());
    };
    draw();
    const ids = names === "" ? [] : names.split(" ");
    const stops = ids.map((id) => page.transcripts.subscribe(id, draw));
    stops.push(page.focus.subscribe(() => plot.current?.point(marked())));
    return () => stops.forEach((stop) => stop());
  }, [page, host, drawing, marked, names, width, height, theme]);
  return <div ref={setHost} className="lines" role="img" aria-label={label} />;
}
