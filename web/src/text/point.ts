// Takes a tap point's name; gives its layer and, in words, where in the block it reads.

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
