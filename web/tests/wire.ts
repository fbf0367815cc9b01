// Builds events and streams as the server sends them, and a fake server with scripted responses.
import type { Server } from "../src/api/http";
import type { RunEvent } from "../src/api/events";
import type { ProbeInfo } from "../src/api/types";
import { NO_SAMPLING, type Run } from "../src/state/types";

export function frame(id: number, event: RunEvent): string {
  return `id: ${id}\nevent: ${event.kind}\ndata: ${JSON.stringify(event.data)}\n\n`;
}

export function token(start: number, ...tokens: string[]): RunEvent {
  const token_ids = tokens.map((_, i) => 100 + start + i);
  return {
    kind: "token",
    data: { part: "answer", choice: 0, start, tokens, token_ids, text: tokens.join("") },
  };
}

export function prompt(start: number, ...tokens: string[]): RunEvent {
  const token_ids = tokens.map((_, i) => start + i);
  return { kind: "token", data: { part: "prompt", choice: 0, start, tokens, token_ids, text: "" } };
}

export function update(
  part: "prompt" | "answer",
  start: number,
  names: string[],
  ...scores: (number | null)[][]
): RunEvent {
  return { kind: "probe_update", data: { part, choice: 0, names, start, scores, lost: null } };
}

export const DONE: RunEvent = {
  kind: "done",
  data: { id: "chat-1", model: "m", finish_reasons: ["stop"], usage: null },
};

/** A body that arrives in the given pieces; "break" ends it like a lost connection. */
export function body(...pieces: string[]): ReadableStream<Uint8Array> {
  const encoder = new TextEncoder();
  const left = [...pieces];
  return new ReadableStream({
    pull(controller) {
      const piece = left.shift();
      if (piece === undefined) controller.close();
      else if (piece === "break") controller.error(new TypeError("network error"));
      else controller.enqueue(encoder.encode(piece));
    },
  });
}

export interface Asked {
  path: string;
  method: string;
}

/** Returns the responses in order, and records the requests. */
export function scripted(...answers: (() => Response)[]): Server & { asked: Asked[] } {
  const asked: Asked[] = [];
  const ask: Server["ask"] = (path, call) => {
    asked.push({ path, method: call?.method ?? "GET" });
    const answer = answers.shift();
    return answer ? Promise.resolve(answer()) : Promise.reject(new TypeError("no route"));
  };
  return { asked, ask, json: () => Promise.reject(new Error("not asked here")) };
}

export function opened(stream: ReadableStream<Uint8Array>): () => Response {
  return () => new Response(stream, { headers: { "X-Clairai-Run": "r1" } });
}

export function probe(name: string, change: Partial<ProbeInfo> = {}): ProbeInfo {
  return {
    name,
    point: "post_block.16",
    activation: "sigmoid",
    threshold: 0.5,
    calibration: [0, 1],
    digest: "d",
    description: null,
    auroc: null,
    histogram: null,
    ...change,
  };
}

export function run(id: string, change: Partial<Run> = {}): Run {
  return {
    id,
    parent: null,
    createdAt: 0,
    serverRun: null,
    model: "m",
    system: "",
    user: "Why?",
    sampling: NO_SAMPLING,
    steer: [],
    stop: [],
    probes: [],
    status: "done",
    error: null,
    ...change,
  };
}
