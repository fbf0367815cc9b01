// Draws the matrix of scores on a canvas.
import type { Extent, Trace } from "./traces";
import { pixelsOf } from "./pixels";

export interface GridLook {
  lut: Uint32Array;
  ink: string;
  faint: string;
  font: string;
}

export interface GridDrawing {
  rows: readonly Trace[];
  chosen: string | null;
  extent: Extent;
  /** Width of the column with the probes' names. */
  gutter: number;
  rowHeight: number;
}

/** The least height of a row with room for its name. */
export const LABEL_HEIGHT = 11;

/** Draws one pixel per cell into a buffer and scales it up without smoothing. */
export class Grid {
  #cells = document.createElement("canvas");

  constructor(readonly canvas: HTMLCanvasElement) {}

  /** Draw the matrix; returns the number of tokens per column. */
  draw(drawing: GridDrawing, width: number, look: GridLook): number {
    const ratio = devicePixelRatio || 1;
    const height = Math.max(1, drawing.rows.length * drawing.rowHeight);
    resize(this.canvas, width, height, ratio);
    const context = this.canvas.getContext("2d");
    const inner = width - drawing.gutter;
    if (!context || inner <= 0) return 1;
    const pixels = pixelsOf(drawing.rows, drawing.extent, Math.floor(inner * ratio), look.lut);
    this.#fill(pixels.width, pixels.height, pixels.data);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.#cells, drawing.gutter * ratio, 0, inner * ratio, height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    seams(context, drawing, width, look);
    labels(context, drawing, look);
    return pixels.perColumn;
  }

  #fill(width: number, height: number, data: Uint32Array<ArrayBuffer>): void {
    this.#cells.width = width;
    this.#cells.height = Math.max(1, height);
    if (height === 0) return;
    const image = new ImageData(new Uint8ClampedArray(data.buffer), width, height);
    this.#cells.getContext("2d")?.putImageData(image, 0, 0);
  }
}

function resize(canvas: HTMLCanvasElement, width: number, height: number, ratio: number): void {
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w) canvas.width = w;
  if (canvas.height !== h) canvas.height = h;
  canvas.style.height = `${height}px`;
}

/** Thin lines between rows that are high enough, and the border between prompt and answer. */
function seams(context: CanvasRenderingContext2D, drawing: GridDrawing, width: number, look: GridLook): void {
  const { extent, gutter, rowHeight, rows } = drawing;
  context.fillStyle = look.faint;
  if (rowHeight >= 8) {
    for (let y = 1; y < rows.length; y += 1) context.fillRect(gutter, y * rowHeight - 0.5, width - gutter, 1);
  }
  if (extent.from >= 0 || extent.to <= 0) return;
  const x = gutter + ((width - gutter) * -extent.from) / (extent.to - extent.from);
  context.fillStyle = look.ink;
  context.fillRect(Math.round(x) - 0.5, 0, 1, rows.length * rowHeight);
}

function labels(context: CanvasRenderingContext2D, drawing: GridDrawing, look: GridLook): void {
  const { rows, rowHeight, gutter, chosen } = drawing;
  if (rowHeight < LABEL_HEIGHT) return;
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const [i, row] of rows.entries()) {
    const isChosen = row.key === chosen;
    context.font = isChosen ? `600 ${look.font}` : look.font;
    context.fillStyle = look.ink;
    context.fillText(cut(context, row.label, gutter - 8), gutter - 6, (i + 0.5) * rowHeight + 0.5);
  }
}

function cut(context: CanvasRenderingContext2D, text: string, room: number): string {
  if (context.measureText(text).width <= room) return text;
  let end = text.length - 1;
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > room) end -= 1;
  return `${text.slice(0, end)}…`;
}
