import { afterEach, describe, expect, it, vi } from "vitest";
import { ApiError, UnreachableError, type Server } from "../src/api/http";
import type { Health } from "../src/api/types";
import { createPageStore } from "../src/state/store";
import { ServerMonitor } from "../src/state/serverMonitor";
import { messageOf } from "../src/views/bar/Banner";
import { statusOf } from "../src/views/bar/Status";
import { probe } from "./wire";

const READY: Health = { status: "ready", reason: null, since: null, model: "m", version: "1", replica: null };
const READER = { delivered: 1, lost: 0, lag: 0, orphaned: 0, attached: true };

function watched(answers: Record<string, unknown>, status = 200) {
  const store = createPageStore();
  const forget = vi.fn();
  const server: Server = {
    ask: (path) => {
      const answer = answers[path];
      if (answer instanceof Error) return Promise.reject(answer);
      return Promise.resolve(new Response(JSON.stringify(answer), { status }));
    },
    json: <T>(path: string) => {
      const answer = answers[path];
      return answer instanceof Error ? Promise.reject(answer) : Promise.resolve(answer as T);
    },
  };
  const monitor = new ServerMonitor(server, store, forget);
  return { store, forget, monitor };
}

const GOOD = {
  health: READY,
  "v1/models": { data: [{ id: "m" }] },
  "v1/probes": { data: [probe("x")], capacity: 1, version: 1 },
  "v1/clairai": {
    model: "m",
    points: [],
    width: 1,
    capacity: 1,
    epoch: "e",
    published: 0,
    unpublished: 0,
    reader: READER,
  },
  "v1/examples": { data: [] },
  "v1/steering/vectors": { data: [], version: 1, points: ["post_block.1"] },
  "v1/steering": { base: [], prefill: [], decode: [], version: 1 },
};

afterEach(() => void vi.clearAllTimers());

describe("the server monitor", () => {
  it("reads everything when the engine is ready", async () => {
    const { store, monitor } = watched(GOOD);
    await monitor.poll();
    monitor.stop();
    expect(store.getState()).toMatchObject({ model: "m", probe: "x", lines: ["x"] });
    expect(statusOf(store.getState().connection)).toEqual({ word: "ready", tone: "good" });
    expect(messageOf(store.getState())).toBeNull();
  });

  it("reports that the engine is starting, with its own message", async () => {
    const health = { ...READY, status: "starting", reason: "loading weights, 12 s" };
    const { store, monitor } = watched({ health }, 503);
    await monitor.poll();
    monitor.stop();
    expect(messageOf(store.getState())).toMatchObject({
      title: "The engine is starting.",
      text: "Loading weights, 12 s.",
    });
    expect(store.getState().probes).toBeNull();
  });

  it("counts failed attempts", async () => {
    const { store, monitor } = watched({ health: new UnreachableError() });
    await monitor.poll();
    await monitor.poll();
    monitor.stop();
    expect(store.getState().connection).toEqual({ kind: "unreachable", attempts: 2 });
    expect(messageOf(store.getState())?.title).toBe("Disconnected.");
  });

  it("asks for a key if the server needs one, and forgets a wrong one", async () => {
    const { store, forget, monitor } = watched({ ...GOOD, "v1/models": new ApiError(401, "no key") });
    await monitor.poll();
    monitor.stop();
    expect(store.getState().key).toEqual({ isNeeded: true, wasRefused: false });
    expect(forget).toHaveBeenCalledOnce();
  });

  it("keeps equal lists, so that nothing renders again", async () => {
    const { store, monitor } = watched(GOOD);
    await monitor.poll();
    const { probes, lines, models, examples } = store.getState();
    await monitor.poll();
    monitor.stop();
    const again = store.getState();
    expect(
      [again.probes, again.lines, again.models, again.examples].map(
        (list, i) => list === [probes, lines, models, examples][i],
      ),
    ).toEqual([true, true, true, true]);
  });

  it("works with a vLLM without clairai", async () => {
    const missing = new ApiError(404, "not found");
    const without = ["v1/probes", "v1/clairai", "v1/steering", "v1/steering/vectors"];
    const answers = { ...GOOD, ...Object.fromEntries(without.map((path) => [path, missing])) };
    const { store, monitor } = watched(answers);
    await monitor.poll();
    monitor.stop();
    expect(store.getState()).toMatchObject({ probes: [], model: "m", engine: null });
    expect(store.getState().steering).toEqual({ kind: "off", reason: null });
  });

  it("shows the engine's reason why it cannot steer", async () => {
    const off = new ApiError(409, "this engine cannot steer");
    const { store, monitor } = watched({ ...GOOD, "v1/steering/vectors": off });
    await monitor.poll();
    monitor.stop();
    expect(store.getState().steering).toEqual({ kind: "off", reason: "this engine cannot steer" });
    expect(store.getState().model).toBe("m");
  });

  it("reads the vectors and the tiers; a missing tier is empty", async () => {
    const base = [{ vector: "joy", scale: 2, op: "add" }];
    const { store, monitor } = watched({ ...GOOD, "v1/steering": { base, version: 2 } });
    await monitor.poll();
    const before = store.getState().steering;
    await monitor.poll();
    monitor.stop();
    expect(before).toMatchObject({
      kind: "on",
      points: ["post_block.1"],
      tiers: { base, prefill: [], decode: [] },
    });
    expect(store.getState().steering).toBe(before);
  });

  it("keeps polling after a response of another server", async () => {
    const { store, monitor } = watched({ ...GOOD, "v1/models": new SyntaxError("not JSON") });
    await monitor.poll();
    expect(store.getState().connection.kind).toBe("unreachable");
    await monitor.poll();
    monitor.stop();
    expect(store.getState().connection).toEqual({ kind: "unreachable", attempts: 1 });
  });

  it("warns of a degraded engine, of loss and of failure", () => {
    const degraded = { ...READY, status: "degraded" as const, reason: "the ring is not attached" };
    const connection = { kind: "answered" as const, health: degraded };
    expect(messageOf({ connection, engine: null, isFrozen: false })?.text).toBe("The ring is not attached.");
    const ready = { kind: "answered" as const, health: READY };
    const engine = { ...GOOD["v1/clairai"], reader: { ...READER, lost: 1234 } };
    expect(messageOf({ connection: ready, engine, isFrozen: false })?.text).toContain("1,234 rows");
    const failed = {
      kind: "answered" as const,
      health: { ...READY, status: "failed" as const, reason: "it died" },
    };
    expect(messageOf({ connection: failed, engine: null, isFrozen: false })).toMatchObject({
      tone: "bad",
      text: "It died.",
    });
    expect(messageOf({ connection: failed, engine: null, isFrozen: true })).toBeNull();
    expect(messageOf({ connection: { kind: "connecting" }, engine: null, isFrozen: false })?.title).toBe(
      "Connecting",
    );
  });
});
