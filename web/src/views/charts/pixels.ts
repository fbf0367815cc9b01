// Computes the pixels of the matrix, one row per trace.
import { position } from "../../colour/domain";
import type { Extent, Trace } from "./traces";

export interface Pixels {
  width: number;
  height: number;
  /** Packed RGBA; 0 is transparent and means no score. */
  data: Uint32Array<ArrayBuffer>;
  /** Tokens per column; above 1 a column shows the highest of them. */
  perColumn: number;
}

export function pixelsOf(rows: readonly Trace[], extent: Extent, maxWidth: number, lut: Uint32Array): Pixels {
  const tokens = Math.max(1, extent.to - extent.from);
  const width = Math.max(1, Math.min(tokens, maxWidth));
  const data = new Uint32Array(width * rows.length);
  for (const [y, row] of rows.entries()) {
    for (let x = 0; x < width; x += 1) {
      const first = extent.from + Math.floor((x * tokens) / width);
      const end = extent.from + Math.floor(((x + 1) * tokens) / width);
      const value = highest(row.values, first - row.start, end - row.start);
      if (!Number.isNaN(value)) data[y * width + x] = colour(row, value, lut);
    }
  }
  return { width, height: rows.length, data, perColumn: tokens / width };
}

function colour(row: Trace, value: number, lut: Uint32Array): number {
  return lut[Math.round(position(row.domain, value) * (lut.length - 1))] ?? 0;
}

/** The highest value in the range; NaN if there is none. */
export function highest(values: Float64Array, first: number, end: number): number {
  let best = NaN;
  const to = Math.min(end, values.length);
  for (let i = Math.max(0, first); i < to; i += 1) {
    const value = values[i] ?? NaN;
    if (value > best || (Number.isNaN(best) && !Number.isNaN(value))) best = value;
  }
  return best;
}
