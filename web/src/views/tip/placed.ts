// Takes what a tooltip points at; gives where it stands: below if there is room, above if not, never outside.

interface Size {
  width: number;
  height: number;
}

const GAP = 8;
const EDGE = 8;

export function placed(target: DOMRect | null, tip: Size, view: Size): { left: number; top: number } {
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
