import { describe, expect, it, vi } from "vitest";
import { Transcript } from "../src/data/transcript";
import { FrameQueue } from "../src/state/frameQueue";
import { createFocus, hover, isSame, move, pin, shownFocus } from "../src/state/focus";
import { TranscriptStore } from "../src/state/transcriptStore";
import { leafOf, pathTo, siblings, toggledLine } from "../src/state/store";
import { keepChoices } from "../src/state/serverMonitor";
import { probe, run, token } from "./wire";

function fakeFrames() {
  const asked: (() => void)[] = [];
  const frames = new FrameQueue((callback) => asked.push(callback));
  return { frames, asked, turn: () => asked.splice(0).forEach((callback) => callback()) };
}

describe("scheduled work", () => {
  it("runs once, however often it was scheduled", () => {
    const { frames, asked, turn } = fakeFrames();
    const work = vi.fn();
    for (let i = 0; i < 1000; i += 1) frames.schedule(work);
    expect(asked).toHaveLength(1);
    turn();
    expect(work).toHaveBeenCalledTimes(1);
  });

  it("that schedules itself again runs in the next frame", () => {
    const { frames, turn } = fakeFrames();
    const work = vi.fn(() => frames.schedule(work));
    frames.schedule(work);
    turn();
    turn();
    expect(work).toHaveBeenCalledTimes(2);
  });
});

it("listeners of a transcript are notified at most once a frame, and only of their own run", () => {
  const { frames, turn } = fakeFrames();
  const transcripts = new TranscriptStore(frames);
  const [ours, other] = [vi.fn(), vi.fn()];
  const stop = transcripts.subscribe("a", ours);
  transcripts.subscribe("b", other);
  for (let i = 0; i < 50; i += 1) {
    transcripts.get("a").apply(token(i, "t"));
    transcripts.notify("a");
  }
  turn();
  expect(ours).toHaveBeenCalledTimes(1);
  expect(other).not.toHaveBeenCalled();
  stop();
  transcripts.notify("a");
  turn();
  expect(ours).toHaveBeenCalledTimes(1);
});

describe("a conversation", () => {
  const runs = {
    a: run("a", { createdAt: 1 }),
    b: run("b", { parent: "a", createdAt: 2, user: "And then?" }),
    c: run("c", { parent: "a", createdAt: 3, user: "Or then?" }),
    d: run("d", { createdAt: 4 }),
  };

  it("is the path from its first turn", () => {
    expect(pathTo(runs, "c").map(({ id }) => id)).toEqual(["a", "c"]);
    expect(pathTo(runs, null)).toEqual([]);
    expect(pathTo(runs, "gone")).toEqual([]);
  });

  it("ends where a stored run names itself as its parent", () => {
    expect(pathTo({ x: run("x", { parent: "x" }) }, "x")).toHaveLength(1);
  });

  it("has variants if a turn was asked again", () => {
    expect(siblings(runs, runs.b).map(({ id }) => id)).toEqual(["b", "c"]);
    expect(siblings(runs, runs.a).map(({ id }) => id)).toEqual(["a", "d"]);
  });

  it("continues to its newest turn", () => {
    expect(leafOf(runs, "a")).toBe("c");
    expect(leafOf(runs, "d")).toBe("d");
  });
});

describe("the marked token", () => {
  const at = (index: number) => ({ run: "r", token: { part: "answer" as const, index } });
  const transcript = new Transcript();
  transcript.apply(token(0, "a", "b", "c"));

  it("is the hovered one, then the pinned one", () => {
    const focus = createFocus();
    pin(focus, at(0), null);
    hover(focus, at(2), null);
    expect(shownFocus(focus.getState())).toEqual(at(2));
    hover(focus, null, null);
    expect(shownFocus(focus.getState())).toEqual(at(0));
  });

  it("is unpinned when it is pinned again", () => {
    const focus = createFocus();
    pin(focus, at(1), null);
    pin(focus, at(1), null);
    expect(shownFocus(focus.getState())).toBeNull();
  });

  it("moves by keys and stops at either end", () => {
    const focus = createFocus();
    move(focus, "r", transcript, 1);
    expect(focus.getState().pin).toEqual(at(0));
    move(focus, "r", transcript, 10);
    expect(focus.getState().pin).toEqual(at(2));
    move(focus, "r", transcript, -1);
    expect(focus.getState().pin).toEqual(at(1));
    move(focus, "r", transcript, -9);
    expect(focus.getState().pin).toEqual(at(0));
  });

  it("does not move without tokens", () => {
    const focus = createFocus();
    move(focus, "r", new Transcript(), 1);
    expect(focus.getState().pin).toBeNull();
  });

  it("is the same only in run, part and index", () => {
    expect(isSame(at(1), at(1))).toBe(true);
    expect(isSame(at(1), { run: "s", token: at(1).token })).toBe(false);
    expect(isSame(at(1), { run: "r", token: { part: "prompt", index: 1 } })).toBe(false);
    expect(isSame(null, null)).toBe(true);
  });
});

describe("the probes of the chart", () => {
  it("are eight at most", () => {
    const full = ["a", "b", "c", "d", "e", "f", "g", "h"];
    expect(toggledLine(full, "i")).toBeNull();
    expect(toggledLine(full, "a")).toEqual(full.slice(1));
    expect(toggledLine(["a"], "b")).toEqual(["a", "b"]);
  });

  it("stay chosen while they exist", () => {
    const bank = [probe("a"), probe("b")];
    expect(keepChoices(bank, "b", ["b"])).toMatchObject({ probe: "b", lines: ["b"] });
    expect(keepChoices(bank, "gone", ["gone"])).toMatchObject({ probe: "a", lines: ["a", "b"] });
    expect(keepChoices([], null, [])).toMatchObject({ probe: null, lines: [] });
  });
});
