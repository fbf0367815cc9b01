// Reads the layer and the place in the block from a point's name.

export interface Place {
  layer: number;
  where: string;
}

const WHERE: Record<string, string> = {
  pre_attn: "before the block",
  post_attn: "after attention",
  post_block: "after the block",
};

export function placeOf(point: string): Place {
  const [kind = "", layer = ""] = point.split(".");
  const number = Number.parseInt(layer, 10);
  return { layer: Number.isNaN(number) ? -1 : number, where: WHERE[kind] ?? point };
}

/** Orders points as a forward pass reaches them; after a block is the same as before the next one. */
function rankOf(point: string): number {
  const [kind = "", layer = ""] = point.split(".");
  const step = { pre_attn: 0, post_attn: 1, post_block: 2 }[kind];
  return step === undefined ? NaN : 2 * Number.parseInt(layer, 10) + step;
}

/** Whether the model reaches `point` only after `other`; false if either is unknown. */
export function isBehind(point: string, other: string): boolean {
  return rankOf(point) > rankOf(other);
}
