// Takes a series of uPlot; gives its line with a gap wherever a score is missing, at most two points a pixel.
import type uPlot from "uplot";

/** uPlot's own paths would draw through a missing score; a gap has to look like one. */
export const gappedLine: uPlot.Series.PathBuilder = (u, series, first, last) => {
  const stroke = new Path2D();
  const pen = new Pen(stroke);
  const xs = u.data[0];
  const ys = u.data[series];
  if (!ys) return { stroke };
  const toX = linear(u.scales.x, u.bbox.left, u.bbox.width);
  const toY = linear(u.scales[u.series[series]?.scale ?? "y"], u.bbox.top + u.bbox.height, -u.bbox.height);
  for (let i = first; i <= last; i += 1) {
    const y = ys[i] ?? NaN;
    if (Number.isNaN(y)) pen.lift();
    else pen.put(Math.round(toX(xs[i] ?? 0)), toY(y));
  }
  pen.lift();
  return { stroke };
};

/** A scale as a straight function: uPlot's own does more for each of many points. */
function linear(scale: uPlot.Scale | undefined, origin: number, size: number): (value: number) => number {
  const min = scale?.min ?? 0;
  const factor = size / ((scale?.max ?? 1) - min || 1);
  return (value) => origin + (value - min) * factor;
}

/** Draws from the highest to the lowest point of each pixel column. */
export class Pen {
  #column = NaN;
  #top = NaN;
  #bottom = NaN;
  #isDown = false;

  constructor(private readonly path: Pick<Path2D, "moveTo" | "lineTo">) {}

  put(x: number, y: number): void {
    if (x !== this.#column) this.#flush();
    this.#column = x;
    this.#top = Number.isNaN(this.#top) ? y : Math.min(this.#top, y);
    this.#bottom = Number.isNaN(this.#bottom) ? y : Math.max(this.#bottom, y);
  }

  /** What comes next begins anew. */
  lift(): void {
    this.#flush();
    this.#isDown = false;
  }

  #flush(): void {
    if (Number.isNaN(this.#top)) return;
    if (this.#isDown) this.path.lineTo(this.#column, this.#bottom);
    else this.path.moveTo(this.#column, this.#bottom);
    // A lone point would not show: it gets a pixel of width.
    const isLone = !this.#isDown && this.#top === this.#bottom;
    if (isLone || this.#top !== this.#bottom) this.path.lineTo(this.#column + (isLone ? 1 : 0), this.#top);
    this.#isDown = true;
    [this.#top, this.#bottom] = [NaN, NaN];
  }
}
