import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import type { RunEvent } from "../src/api/events";
import { ProtocolError } from "../src/api/events";
import {
  ConnectionLostError,
  resumeRun,
  RETRY_MS,
  RunGoneError,
  startRun,
  type Follower,
} from "../src/api/follow";
import { ApiError } from "../src/api/http";
import { body, DONE, frame, opened, scripted, token } from "./wire";

class Listener implements Follower {
  readonly events: RunEvent[] = [];
  readonly attempts: number[] = [];
  readonly runs: string[] = [];
  opened = (run: string) => void this.runs.push(run);
  event = (event: RunEvent) => void this.events.push(event);
  retrying = (attempt: number) => void this.attempts.push(attempt);
}

const [A, B] = [token(0, "a"), token(1, "b")];
const never = new AbortController().signal;

async function follow(
  server: ReturnType<typeof scripted>,
  listener: Listener,
  signal = never,
): Promise<void> {
  const following = startRun(server, "v1/chat/completions", {}, listener, signal);
  // Delays are not tested here: every pause ends at once.
  const settled = following.catch(() => undefined);
  await vi.runAllTimersAsync();
  await settled;
  await following;
}

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

describe("a run that is followed", () => {
  it("delivers its events in order and names its run", async () => {
    const listener = new Listener();
    await follow(scripted(opened(body(frame(1, A) + frame(2, B), frame(3, DONE)))), listener);
    expect(listener.events).toEqual([A, B, DONE]);
    expect(listener.runs).toEqual(["r1"]);
    expect(listener.attempts).toEqual([]);
  });

  it("continues after a broken connection, from the next event, by GET", async () => {
    const listener = new Listener();
    const server = scripted(opened(body(frame(1, A), "break")), opened(body(frame(2, B), frame(3, DONE))));
    await follow(server, listener);
    expect(listener.events).toEqual([A, B, DONE]);
    expect(server.asked).toEqual([
      { path: "v1/chat/completions", method: "POST" },
      { path: "v1/runs/r1?after=1", method: "GET" },
    ]);
    expect(listener.attempts).toEqual([1, 0]);
  });

  it("continues if the stream ends without its last event", async () => {
    const listener = new Listener();
    await follow(scripted(opened(body(frame(1, A))), opened(body(frame(2, DONE)))), listener);
    expect(listener.events).toEqual([A, DONE]);
  });

  it("ignores an event that is sent again", async () => {
    const listener = new Listener();
    const again = frame(1, A) + frame(2, B) + frame(3, DONE);
    await follow(scripted(opened(body(frame(1, A), frame(2, B), "break")), opened(body(again))), listener);
    expect(listener.events).toEqual([A, B, DONE]);
  });

  it("refuses a stream with an event missing", async () => {
    const listener = new Listener();
    const following = follow(scripted(opened(body(frame(1, A), frame(3, DONE)))), listener);
    await expect(following).rejects.toBeInstanceOf(ProtocolError);
    expect(listener.events).toEqual([A]);
  });

  it("refuses an event without a number", async () => {
    const nameless = opened(body("event: done\ndata: {}\n\n"));
    await expect(follow(scripted(nameless), new Listener())).rejects.toBeInstanceOf(ProtocolError);
  });

  it("gives up after its last attempt without starting a second generation", async () => {
    const server = scripted(opened(body(frame(1, A), "break")));
    await expect(follow(server, new Listener())).rejects.toBeInstanceOf(ConnectionLostError);
    expect(server.asked.filter(({ method }) => method === "POST")).toHaveLength(1);
    expect(server.asked.filter(({ method }) => method === "GET")).toHaveLength(RETRY_MS.length);
  });

  it("resets the attempts once events arrive again", async () => {
    const broken = Array.from({ length: RETRY_MS.length + 2 }, (_, i) =>
      opened(body(frame(i + 1, token(i, "x")), "break")),
    );
    const listener = new Listener();
    const last = opened(body(frame(RETRY_MS.length + 3, DONE)));
    await follow(scripted(...broken, last), listener);
    expect(listener.events.at(-1)).toEqual(DONE);
    expect(Math.max(...listener.attempts)).toBe(1);
  });

  it.each([404, 410])("reports that the run is gone at status %d", async (status) => {
    const server = scripted(opened(body("break")), () => new Response("{}", { status }));
    await expect(follow(server, new Listener())).rejects.toBeInstanceOf(RunGoneError);
  });

  it("waits for a server that answers 503", async () => {
    const listener = new Listener();
    const busy = () => new Response("{}", { status: 503 });
    await follow(scripted(opened(body(frame(1, A), "break")), busy, opened(body(frame(2, DONE)))), listener);
    expect(listener.events).toEqual([A, DONE]);
  });

  it("passes on the message of a refusal", async () => {
    const error = { error: { message: "no such probe", type: "x", param: null, code: null } };
    const refused = () => new Response(JSON.stringify(error), { status: 400 });
    const following = follow(scripted(refused), new Listener());
    await expect(following).rejects.toEqual(new ApiError(400, "no such probe"));
  });

  it("ignores unknown kinds of events", async () => {
    const listener = new Listener();
    const text = `${frame(1, A)}id: 2\nevent: novelty\ndata: {}\n\n${frame(3, DONE)}`;
    await follow(scripted(opened(body(text))), listener);
    expect(listener.events).toEqual([A, DONE]);
  });

  it("stops when it is aborted, and does not reconnect", async () => {
    const controller = new AbortController();
    const server = scripted(opened(body(frame(1, A), "break")), opened(body(frame(2, DONE))));
    const listener = new Listener();
    listener.retrying = () => {
      controller.abort();
    };
    await expect(follow(server, listener, controller.signal)).rejects.toThrow(/abort/i);
    expect(server.asked).toHaveLength(1);
  });

  it("is resumed from its first event after the page was closed", async () => {
    const listener = new Listener();
    const server = scripted(opened(body(frame(1, A), frame(2, DONE))));
    const resuming = resumeRun(server, "r9", listener, never);
    await vi.runAllTimersAsync();
    await resuming;
    expect(server.asked).toEqual([{ path: "v1/runs/r9?after=0", method: "GET" }]);
    expect(listener.events).toEqual([A, DONE]);
  });
});
