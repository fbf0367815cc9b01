// Draws the line chart with uPlot, and reports the token under the pointer.
import uPlot from "uplot";
import { brief } from "../../text/number";
import type { LineStyle } from "../../colour/lines";
import { drawLine } from "./drawLine";
import { isCommon, spread, type Extent, type Trace } from "./traces";

export interface PointerActions {
  hover(token: number | null, event: PointerEvent): void;
  pin(token: number, event: MouseEvent): void;
  zoom(span: readonly [number, number] | null): void;
}

export interface Drawing {
  traces: readonly Trace[];
  styles: ReadonlyMap<string, LineStyle>;
  /** The line that is drawn bold and with its threshold. */
  chosen: string | null;
  extent: Extent;
  shown: Extent;
}

export const GUTTER = 110;
const AXIS_HEIGHT = 22;
const DRAG_PX = 4;

export class Plot {
  #plot: uPlot | null = null;
  #shape = "";
  #drawing: Drawing | null = null;

  constructor(
    private readonly host: HTMLElement,
    private readonly pointer: PointerActions,
  ) {}

  /** `look` is what the colours depend on besides the drawing: the theme. */
  draw(drawing: Drawing, width: number, height: number, look: string): void {
    if (width <= GUTTER) return;
    this.#drawing = drawing;
    const keys = drawing.traces.map((trace) => `${trace.key}:${drawing.styles.get(trace.key)?.colour ?? ""}`);
    const shape = [look, drawing.chosen, isCommon(drawing.traces), ...keys].join("|");
    if (shape !== this.#shape) this.#rebuild(drawing, width, height);
    this.#shape = shape;
    const plot = this.#plot;
    if (!plot) return;
    if (plot.width !== width || plot.height !== height) plot.setSize({ width, height });
    plot.setData(dataOf(drawing), false);
    plot.setScale("x", { min: drawing.shown.from, max: Math.max(drawing.shown.to, drawing.shown.from + 1) });
  }

  /** Move the cursor line to a token; null hides it. */
  point(token: number | null): void {
    const left = token === null ? -10 : (this.#plot?.valToPos(token + 0.5, "x") ?? -10);
    this.#plot?.setCursor({ left, top: left < 0 ? -10 : 0 }, false);
  }

  get canvas(): HTMLCanvasElement | null {
    return this.#plot?.ctx.canvas ?? null;
  }

  destroy(): void {
    this.#plot?.destroy();
    this.#plot = null;
    this.#shape = "";
  }

  #rebuild(drawing: Drawing, width: number, height: number): void {
    this.#plot?.destroy();
    const style = getComputedStyle(this.host);
    const tone = (name: string) => style.getPropertyValue(name).trim();
    const shared = isCommon(drawing.traces);
    const options: uPlot.Options = {
      width,
      height,
      padding: [8, 0, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        points: { show: false },
        drag: { x: true, y: false, setScale: false, dist: DRAG_PX },
        bind: { dblclick: () => () => (this.pointer.zoom(null), null) },
      },
      scales: { x: { time: false, range: (_, min, max) => [min, max] }, ...scalesOf(drawing.traces) },
      axes: [xAxis(tone), yAxis(tone, scaleKey(drawing, shared))],
      series: [{}, ...drawing.traces.map((trace) => seriesOf(trace, shared))],
      hooks: {
        drawAxes: [(u) => this.#underlay(u, tone)],
        draw: [(u) => this.#lines(u)],
        setSelect: [(u) => this.#select(u)],
      },
    };
    this.#plot = new uPlot(options, dataOf(drawing), this.host);
    this.#listen(this.#plot);
  }

  /** Draws the prompt's background and the chosen line's threshold. */
  #underlay(u: uPlot, tone: (name: string) => string): void {
    const { ctx, bbox } = u;
    const drawing = this.#drawing;
    if (!drawing) return;
    const border = Math.min(bbox.left + bbox.width, Math.max(bbox.left, u.valToPos(0, "x", true)));
    ctx.save();
    ctx.fillStyle = tone("--ground-prompt");
    ctx.fillRect(bbox.left, bbox.top, border - bbox.left, bbox.height);
    const chosen = drawing.traces.find(({ key }) => key === drawing.chosen);
    if (chosen?.threshold != null) {
      const y = u.valToPos(chosen.threshold, scaleKey(drawing, isCommon(drawing.traces)), true);
      ctx.strokeStyle = tone("--ink-2");
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    ctx.restore();
  }

  /** Draws the lines, the chosen one last and above the others. */
  #lines(u: uPlot): void {
    const drawing = this.#drawing;
    const [first, last] = u.series[0]?.idxs ?? [0, -1];
    if (!drawing) return;
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const isChosen = ({ key }: Trace) => (key === drawing.chosen ? 1 : 0);
    const shared = isCommon(drawing.traces);
    for (const trace of [...drawing.traces].sort((a, b) => isChosen(a) - isChosen(b))) {
      const style = drawing.styles.get(trace.key);
      if (!style) continue;
      const toX = linear(u.scales.x, bbox.left, bbox.width);
      const toY = linear(u.scales[shared ? "y" : trace.key], bbox.top + bbox.height, -bbox.height);
      const values = spread(trace, drawing.extent);
      const line = { values, first, last, toX: (i: number) => toX(drawing.extent.from + i + 0.5), toY };
      const width = devicePixelRatio * (isChosen(trace) ? 2.25 : 1.25);
      drawLine(ctx, line, {
        colour: style.colour,
        width,
        dash: style.dash.map((px) => px * devicePixelRatio),
      });
    }
    ctx.restore();
  }

  #select(u: uPlot): void {
    const { left, width } = u.select;
    if (width < DRAG_PX) return;
    const span = [Math.floor(u.posToVal(left, "x")), Math.ceil(u.posToVal(left + width, "x"))] as const;
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.pointer.zoom(span);
  }

  #listen(plot: uPlot): void {
    const { over } = plot;
    let downAt = NaN;
    const token = (event: MouseEvent) => Math.floor(plot.posToVal(event.offsetX, "x"));
    over.addEventListener("pointerdown", (event) => (downAt = event.clientX));
    over.addEventListener("pointermove", (event) => this.pointer.hover(token(event), event));
    over.addEventListener("pointerleave", (event) => this.pointer.hover(null, event));
    over.addEventListener("click", (event) => {
      if (Math.abs(event.clientX - downAt) < DRAG_PX) this.pointer.pin(token(event), event);
    });
  }
}

/** A scale as a linear function; uPlot's own does more work per point. */
function linear(scale: uPlot.Scale | undefined, origin: number, size: number): (value: number) => number {
  const min = scale?.min ?? 0;
  const factor = size / ((scale?.max ?? 1) - min || 1);
  return (value) => origin + (value - min) * factor;
}

function scaleKey(drawing: Drawing, shared: boolean): string {
  const chosen = drawing.traces.find(({ key }) => key === drawing.chosen) ?? drawing.traces[0];
  return shared || !chosen ? "y" : chosen.key;
}

function scalesOf(traces: readonly Trace[]): uPlot.Scales {
  const scales: uPlot.Scales = { y: { range: () => [traces[0]?.axis[0] ?? 0, traces[0]?.axis[1] ?? 1] } };
  for (const { key, axis } of traces) scales[key] = { range: () => [axis[0], axis[1]] };
  return scales;
}

/** uPlot draws only axes and cursor: it would connect lines across missing scores. */
function seriesOf(trace: Trace, shared: boolean): uPlot.Series {
  return { scale: shared ? "y" : trace.key, paths: () => null, points: { show: false } };
}

function dataOf(drawing: Drawing): uPlot.AlignedData {
  const { extent } = drawing;
  const xs = Float64Array.from({ length: extent.to - extent.from }, (_, i) => extent.from + i + 0.5);
  return [xs, ...drawing.traces.map((trace) => spread(trace, extent))];
}

function xAxis(tone: (name: string) => string): uPlot.Axis {
  return {
    size: AXIS_HEIGHT,
    gap: 3,
    font: tone("--font-axis"),
    stroke: tone("--ink-2"),
    grid: { show: false },
    ticks: { show: true, size: 3, width: 1, stroke: tone("--rule") },
    incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000],
    // A label is centred under its token.
    splits: (_, __, min, max, step) => {
      const ticks: number[] = [];
      for (let at = Math.ceil(min / step) * step; at < max; at += step) ticks.push(at + 0.5);
      return ticks;
    },
    // A label that would be cut off is omitted.
    values: (u, ticks) =>
      ticks.map((tick) => {
        const isCut = u.valToPos(tick, "x") > u.bbox.width / devicePixelRatio - 12;
        return isCut ? "" : `${Math.floor(tick)}`.replace("-", "\u2212");
      }),
  };
}

function yAxis(tone: (name: string) => string, scale: string): uPlot.Axis {
  return {
    scale,
    size: GUTTER,
    gap: 4,
    space: 34,
    font: tone("--font-axis"),
    stroke: tone("--ink-2"),
    grid: { stroke: tone("--rule-soft"), width: 1 },
    ticks: { show: false },
    values: (_, ticks) => ticks.map(brief),
  };
}
