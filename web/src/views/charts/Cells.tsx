// The matrix of scores over tokens, kept up to date, with the marked token.
import { useEffect, useRef, useState } from "react";
import { lookup } from "../../colour/ramp";
import { usePage } from "../../state/page";
import { useTheme, useWidth } from "../hooks";
import { Grid, type GridDrawing } from "./grid";
import type { Extent } from "./traces";

export interface CellPointerActions {
  hover(token: number | null, row: number, event: PointerEvent): void;
  pin(token: number, row: number, event: MouseEvent): void;
}

interface Props {
  drawing: () => GridDrawing;
  runs: readonly string[];
  label: string;
  pointer: CellPointerActions;
  marked: () => number | null;
  /** Called with the number of tokens per column. */
  onScale?: (perColumn: number) => void;
}

export function Cells({ drawing, runs, label, pointer, marked, onScale }: Props) {
  const page = usePage();
  const theme = useTheme();
  const [host, setHost] = useState<HTMLDivElement | null>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const cursor = useRef<HTMLDivElement>(null);
  const width = useWidth(host);
  const names = runs.join(" ");
  useEffect(() => {
    if (!canvas.current || !host || width === 0) return;
    const grid = new Grid(canvas.current);
    const style = getComputedStyle(host);
    const look = {
      lut: lookup(theme),
      ink: style.getPropertyValue("--ink-2").trim(),
      faint: style.getPropertyValue("--panel").trim(),
      font: style.getPropertyValue("--font-axis").trim(),
    };
    const point = () => place(cursor.current, drawing(), width, marked());
    const draw = () => {
      const perColumn = grid.draw(drawing(), width, look);
      onScale?.(perColumn);
      point();
    };
    draw();
    const ids = names === "" ? [] : names.split(" ");
    const stops = ids.map((id) => page.transcripts.subscribe(id, draw));
    stops.push(page.focus.subscribe(point), listen(canvas.current, drawing, pointer));
    return () => stops.forEach((stop) => stop());
  }, [page, host, drawing, pointer, marked, onScale, names, width, theme]);
  return (
    <div ref={setHost} className="cells" role="group" aria-label={label} tabIndex={0}>
      <canvas ref={canvas} />
      <div ref={cursor} className="cells-cursor" aria-hidden="true" />
    </div>
  );
}

function place(
  cursor: HTMLDivElement | null,
  drawing: GridDrawing,
  width: number,
  token: number | null,
): void {
  if (!cursor) return;
  const { extent, gutter } = drawing;
  const isIn = token !== null && token >= extent.from && token < extent.to;
  cursor.hidden = !isIn;
  if (!isIn) return;
  const cell = (width - gutter) / (extent.to - extent.from);
  cursor.style.left = `${gutter + (token - extent.from) * cell}px`;
  cursor.style.width = `${Math.max(2, cell)}px`;
}

function listen(
  canvas: HTMLCanvasElement,
  drawing: () => GridDrawing,
  pointer: CellPointerActions,
): () => void {
  const find = (event: MouseEvent) => {
    const now = drawing();
    const row = Math.floor(event.offsetY / now.rowHeight);
    return { row, token: tokenAt(event.offsetX - now.gutter, canvas.clientWidth - now.gutter, now.extent) };
  };
  const move = (event: PointerEvent) => {
    const { row, token } = find(event);
    pointer.hover(token, row, event);
  };
  const leave = (event: PointerEvent) => pointer.hover(null, 0, event);
  const click = (event: MouseEvent) => {
    const { row, token } = find(event);
    if (token !== null) pointer.pin(token, row, event);
  };
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("click", click);
  return () => {
    canvas.removeEventListener("pointermove", move);
    canvas.removeEventListener("pointerleave", leave);
    canvas.removeEventListener("click", click);
  };
}

function tokenAt(x: number, width: number, extent: Extent): number | null {
  if (x < 0 || x >= width) return null;
  return extent.from + Math.floor((x / width) * (extent.to - extent.from));
}
