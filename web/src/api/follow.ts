// Delivers every event of a run exactly once and in order, reconnecting where needed.
import type { EventSourceMessage } from "eventsource-parser";
import { decode, isLast, ProtocolError, type RunEvent } from "./events";
import { ApiError, refusal, type Server } from "./http";
import { frames } from "./sse";

export const RETRY_MS = [200, 500, 1000, 2000, 4000] as const;

/** The server no longer holds the run, or not the events that are still needed. */
export class RunGoneError extends Error {
  override name = "RunGoneError";
}

/** The connection was lost and could not be restored. */
export class ConnectionLostError extends Error {
  override name = "LostError";
}

export interface Follower {
  opened(serverRun: string): void;
  event(event: RunEvent): void;
  /** `attempt` counts from 1; 0 means that the connection is back. */
  retrying(attempt: number): void;
}

interface Progress {
  run: string;
  after: number;
}

export async function startRun(
  server: Server,
  path: string,
  body: unknown,
  follower: Follower,
  signal: AbortSignal,
): Promise<void> {
  // Never retried: a second POST would start a second generation.
  const answer = await server.ask(path, { method: "POST", body, signal });
  if (!answer.ok) throw await refusal(answer);
  const run = answer.headers.get("X-Clairai-Run");
  if (run === null) throw new ProtocolError("The response names no run (X-Clairai-Run).");
  follower.opened(run);
  await followFrom(server, { run, after: 0 }, answer, follower, signal);
}

/** Follow a run that was started before, from its first event. */
export async function resumeRun(
  server: Server,
  run: string,
  follower: Follower,
  signal: AbortSignal,
): Promise<void> {
  await followFrom(server, { run, after: 0 }, null, follower, signal);
}

async function followFrom(
  server: Server,
  progress: Progress,
  first: Response | null,
  follower: Follower,
  signal: AbortSignal,
): Promise<void> {
  let answer = first;
  let failures = 0;
  for (;;) {
    if (answer) {
      const before = progress.after;
      if (await drain(answer, progress, follower, signal)) return;
      if (progress.after > before) failures = 0;
    }
    if (failures === RETRY_MS.length) {
      throw new ConnectionLostError("The connection was lost and could not be restored.");
    }
    const waitMs = RETRY_MS[failures] ?? 0;
    failures += 1;
    follower.retrying(failures);
    await pause(waitMs, signal);
    answer = await reopen(server, progress, signal);
    if (answer) follower.retrying(0);
  }
}

/** True at the run's last event; false if the connection broke before it. */
async function drain(
  answer: Response,
  progress: Progress,
  follower: Follower,
  signal: AbortSignal,
): Promise<boolean> {
  if (!answer.body) return false;
  const stream = frames(answer.body);
  try {
    for (;;) {
      const frame = await next(stream, signal);
      if (!frame) return false;
      const event = accepted(frame.id, frame.event, frame.data, progress);
      if (event) follower.event(event);
      if (event && isLast(event)) return true;
    }
  } finally {
    await stream.return(undefined);
  }
}

/** The next frame; null if the connection ended or broke. */
async function next(
  stream: AsyncGenerator<EventSourceMessage>,
  signal: AbortSignal,
): Promise<EventSourceMessage | null> {
  try {
    const step = await stream.next();
    return step.done ? null : step.value;
  } catch (error) {
    if (signal.aborted) throw error;
    return null;
  }
}

/** The event if it is the next one; null if it was seen before. */
function accepted(
  id: string | undefined,
  kind: string | undefined,
  data: string,
  progress: Progress,
): RunEvent | null {
  const number = Number(id);
  if (!Number.isSafeInteger(number) || number < 1) {
    throw new ProtocolError(`An event arrived without a number: ${id ?? "none"}`);
  }
  if (number <= progress.after) return null;
  if (number !== progress.after + 1) {
    throw new ProtocolError(`Event ${number} arrived after ${progress.after}: events are missing.`);
  }
  const event = decode(kind ?? "message", data);
  progress.after = number;
  return event;
}

async function reopen(server: Server, progress: Progress, signal: AbortSignal): Promise<Response | null> {
  let answer: Response;
  try {
    answer = await server.ask(`v1/runs/${progress.run}?after=${progress.after}`, { signal });
  } catch (error) {
    if (signal.aborted) throw error;
    return null;
  }
  if (answer.ok) return answer;
  if (answer.status === 404 || answer.status === 410) {
    throw new RunGoneError("The server no longer holds this run.");
  }
  const error = await refusal(answer);
  if (answer.status >= 500) return null;
  throw new ApiError(error.status, error.message);
}

async function pause(ms: number, signal: AbortSignal): Promise<void> {
  signal.throwIfAborted();
  await new Promise<void>((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener(
      "abort",
      () => {
        clearTimeout(timer);
        reject(new DOMException("stopped", "AbortError"));
      },
      { once: true },
    );
  });
}
