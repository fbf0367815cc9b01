// Places the tooltip below its token, or above where there is no room, inside the window.

interface Size {
  width: number;
  height: number;
}

const GAP = 8;
const EDGE = 8;

export function placeTip(target: DOMRect | null, tip: Size, view: Size): { left: number; top: number } {
  if (!target) return { left: view.width - tip.width - EDGE, top: EDGE };
  const below = target.bottom + GAP;
  const above = target.top - GAP - tip.height;
  const fitsBelow = below + tip.height <= view.height - EDGE;
  const top = fitsBelow || above < EDGE ? below : above;
  return {
    left: clamp(target.left - 12, EDGE, view.width - tip.width - EDGE),
    top: clamp(top, EDGE, view.height - tip.height - EDGE),
  };
}

function clamp(value: number, low: number, high: number): number {
  return Math.max(low, Math.min(value, high));
}
