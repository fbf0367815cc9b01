// Draws one line of scores on a canvas, with a gap wherever a score is missing.

/** The part of a canvas context that drawing lines needs. */
export type Surface = Pick<
  CanvasRenderingContext2D,
  | "beginPath"
  | "moveTo"
  | "lineTo"
  | "stroke"
  | "fillRect"
  | "strokeStyle"
  | "fillStyle"
  | "lineWidth"
  | "setLineDash"
>;

export interface LineData {
  values: Float64Array;
  first: number;
  last: number;
  /** The x coordinate of an index of the series. */
  toX: (index: number) => number;
  toY: (value: number) => number;
}

export interface Stroke {
  colour: string;
  width: number;
  dash: readonly number[];
}

/** With fewer pixels per token, one bar per pixel column is drawn, which is much faster than strokes. */
const SPARSE_PX = 0.7;

export function drawLine(surface: Surface, line: LineData, stroke: Stroke): void {
  const perToken = line.toX(1) - line.toX(0);
  if (perToken >= SPARSE_PX) drawStroke(surface, line, stroke);
  else drawBars(surface, line, stroke);
}

function drawStroke(surface: Surface, line: LineData, stroke: Stroke): void {
  const { values, first, last, toX, toY } = line;
  surface.strokeStyle = stroke.colour;
  surface.lineWidth = stroke.width;
  surface.setLineDash([...stroke.dash]);
  surface.beginPath();
  let isDown = false;
  for (let i = first; i <= last; i += 1) {
    const value = values[i] ?? NaN;
    const isKnown = !Number.isNaN(value);
    if (isKnown && isDown) surface.lineTo(toX(i), toY(value));
    else if (isKnown) begin(surface, toX(i), toY(value), stroke.width);
    isDown = isKnown;
  }
  surface.stroke();
}

/** A single point would not be visible, so it gets a little width. */
function begin(surface: Surface, x: number, y: number, width: number): void {
  surface.moveTo(x - width / 2, y);
  surface.lineTo(x, y);
}

/** Draws a bar from the highest to the lowest point of each pixel column, joined to the one before. */
function drawBars(surface: Surface, line: LineData, stroke: Stroke): void {
  const { values, first, last, toX, toY } = line;
  surface.fillStyle = stroke.colour;
  let [column, top, bottom, before] = [NaN, NaN, NaN, NaN];
  const flush = () => {
    if (Number.isNaN(column)) return;
    surface.fillRect(column, top - stroke.width / 2, stroke.width, bottom - top + stroke.width);
    column = NaN;
  };
  for (let i = first; i <= last; i += 1) {
    const value = values[i] ?? NaN;
    if (Number.isNaN(value)) {
      flush();
      before = NaN;
      continue;
    }
    const [x, y] = [Math.floor(toX(i)), toY(value)];
    if (x !== column) {
      flush();
      [column, top, bottom] = [x, y, y];
      if (!Number.isNaN(before)) [top, bottom] = [Math.min(y, before), Math.max(y, before)];
    }
    if (y < top) top = y;
    if (y > bottom) bottom = y;
    before = y;
  }
  flush();
}
