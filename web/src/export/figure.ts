// Draws a run as a picture for a slide: tokens, legend and matrix.
import type { ProbeInfo } from "../api/types";
import { domainOf, edge, isOver, position } from "../colour/domain";
import { colourAt, lookup, PAPER, swatch, type Theme } from "../colour/ramp";
import type { Transcript } from "../data/transcript";
import type { Run } from "../state/types";
import { brief, counted } from "../text/number";
import { shown, visible } from "../text/token";
import { pixelsOf } from "../views/charts/pixels";
import { extentOf, traceOf } from "../views/charts/traces";

const WIDTH = 1200;
const MARGIN = 48;
const LINE = 30;
const SCALE = 2;
/** Canvases are limited to 16384 pixels; a longer run is cut, and the picture says so. */
const MAX_TOKEN_LINES = 120;
const FONT = '"IBM Plex Sans Variable", system-ui, sans-serif';

interface Piece {
  text: string;
  x: number;
  line: number;
  width: number;
  row: number;
}

export function figure(
  run: Run,
  transcript: Transcript,
  probe: ProbeInfo,
  probes: readonly ProbeInfo[],
  theme: Theme,
): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  const context = canvas.getContext("2d");
  if (!context) throw new Error("This browser cannot draw on a canvas.");
  context.font = `17px ${FONT}`;
  const pieces = laidOut(context, transcript);
  const shownPieces = pieces.filter(({ line }) => line < MAX_TOKEN_LINES);
  const tokensTop = 130;
  const numLines = (shownPieces.at(-1)?.line ?? 0) + 1;
  const matrixTop = tokensTop + numLines * LINE + 40;
  const rowHeight = probes.length > 24 ? 6 : 16;
  canvas.width = WIDTH * SCALE;
  canvas.height = (matrixTop + probes.length * rowHeight + MARGIN) * SCALE;
  context.scale(SCALE, SCALE);
  const ink = theme === "light" ? "#17181b" : "#ecebe7";
  context.fillStyle = PAPER[theme];
  context.fillRect(0, 0, WIDTH, canvas.height / SCALE);
  title(context, run, probe, ink);
  legend(context, probe, theme, ink);
  tokens(context, shownPieces, transcript, probe, theme, tokensTop, ink);
  if (shownPieces.length < pieces.length) {
    context.fillText(counted(pieces.length - shownPieces.length, "more token"), MARGIN, matrixTop - 14);
  }
  matrix(context, transcript, probes, theme, matrixTop, rowHeight, ink);
  return canvas;
}

/** Lines break between tokens and at newlines, as on the page. */
function laidOut(context: CanvasRenderingContext2D, transcript: Transcript): Piece[] {
  const pieces: Piece[] = [];
  let [x, line] = [MARGIN, 0];
  for (let row = 0; row < transcript.length; row += 1) {
    const token = transcript.wordAt(row);
    const text = token.includes("\n") ? visible(token) : shown(token);
    const width = Math.max(4, context.measureText(text).width);
    if (x + width > WIDTH - MARGIN && x > MARGIN) [x, line] = [MARGIN, line + 1];
    pieces.push({ text, x, line, width, row });
    x += width;
    if (token.includes("\n") || row === transcript.promptLength - 1) [x, line] = [MARGIN, line + 1];
  }
  return pieces;
}

function title(context: CanvasRenderingContext2D, run: Run, probe: ProbeInfo, ink: string): void {
  context.fillStyle = ink;
  context.font = `600 20px ${FONT}`;
  context.fillText(probe.name, MARGIN, 52);
  context.font = `15px ${FONT}`;
  context.fillText(`${run.model}, ${probe.point}`, MARGIN, 76);
}

function legend(context: CanvasRenderingContext2D, probe: ProbeInfo, theme: Theme, ink: string): void {
  const domain = domainOf(probe);
  const [left, width, top] = [WIDTH - MARGIN - 320, 320, 40];
  for (let i = 0; i < width; i += 1) {
    const value = domain.low + (i / width) * (domain.high - domain.low);
    context.fillStyle = colourAt(theme, position(domain, value));
    context.fillRect(left + i, top, 1.5, 12);
  }
  context.fillStyle = ink;
  context.font = `13px ${FONT}`;
  const label = (value: number, text: string, align: CanvasTextAlign) => {
    context.textAlign = align;
    context.fillText(text, left + (width * (value - domain.low)) / (domain.high - domain.low), top + 30);
  };
  label(domain.low, brief(edge(domain, domain.low)), "left");
  label(domain.high, brief(edge(domain, domain.high)), "right");
  if (probe.threshold !== null) label(probe.threshold, `threshold ${brief(probe.threshold)}`, "center");
  context.textAlign = "left";
}

function tokens(
  context: CanvasRenderingContext2D,
  pieces: readonly Piece[],
  transcript: Transcript,
  probe: ProbeInfo,
  theme: Theme,
  top: number,
  ink: string,
): void {
  const domain = domainOf(probe);
  context.font = `17px ${FONT}`;
  for (const { text, x, line, width, row } of pieces) {
    const value = transcript.scores.value(probe.name, row);
    const y = top + line * LINE;
    const colours = Number.isNaN(value) ? null : swatch(theme, position(domain, value));
    if (colours) {
      context.fillStyle = colours.fill;
      context.fillRect(x, y - 18, width, 25);
    }
    context.fillStyle = colours?.ink ?? ink;
    context.fillText(text, x, y);
    if (isOver(probe.threshold, value)) context.fillRect(x, y + 4, width - 1, 2);
  }
  context.fillStyle = ink;
}

function matrix(
  context: CanvasRenderingContext2D,
  transcript: Transcript,
  probes: readonly ProbeInfo[],
  theme: Theme,
  top: number,
  rowHeight: number,
  ink: string,
): void {
  const left = MARGIN + 160;
  const width = WIDTH - MARGIN - left;
  const rows = probes.map((probe) => traceOf(transcript, probe));
  const pixels = pixelsOf(rows, extentOf([transcript]), width, lookup(theme));
  if (pixels.height === 0) return;
  const cells = document.createElement("canvas");
  [cells.width, cells.height] = [pixels.width, pixels.height];
  const image = new ImageData(new Uint8ClampedArray(pixels.data.buffer), pixels.width, pixels.height);
  cells.getContext("2d")?.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(cells, left, top, width, rows.length * rowHeight);
  if (rowHeight < 12) return;
  context.fillStyle = ink;
  context.font = `12px ${FONT}`;
  for (const [i, row] of rows.entries()) context.fillText(row.label, MARGIN, top + (i + 0.75) * rowHeight);
}
