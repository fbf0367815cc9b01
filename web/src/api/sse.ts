// Reads the events of a server-sent event stream until it ends or stays silent too long.
import { createParser, type EventSourceMessage } from "eventsource-parser";

/** Longer than two of the server's 15-second pings: by then the connection is dead. */
export const SILENCE_MS = 40_000;

export class SilenceError extends Error {
  override name = "SilenceError";
}

export async function* frames(
  body: ReadableStream<Uint8Array>,
  silenceMs: number = SILENCE_MS,
): AsyncGenerator<EventSourceMessage> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let ready: EventSourceMessage[] = [];
  const parser = createParser({ onEvent: (message) => ready.push(message) });
  try {
    for (;;) {
      const { done, value } = await withDeadline(reader.read(), silenceMs);
      if (done) return;
      parser.feed(decoder.decode(value, { stream: true }));
      const batch = ready;
      ready = [];
      yield* batch;
    }
  } finally {
    // Without this the abandoned reader would keep the connection open.
    reader.cancel().catch(() => undefined);
  }
}

async function withDeadline<T>(promise: Promise<T>, ms: number): Promise<T> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const silence = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new SilenceError(`nothing came for ${ms / 1000} s`)), ms);
  });
  try {
    return await Promise.race([promise, silence]);
  } finally {
    clearTimeout(timer);
  }
}
