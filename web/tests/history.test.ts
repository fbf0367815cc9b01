import { IDBFactory } from "fake-indexeddb";
import { describe, expect, it } from "vitest";
import { toFile } from "../src/data/runFile";
import { Transcript } from "../src/data/transcript";
import { openHistory } from "../src/state/history";
import { safeStorage } from "../src/state/safeStorage";
import { probe, run, token } from "./wire";

function fileOf(id: string, createdAt: number) {
  const transcript = new Transcript();
  transcript.apply(token(0, id));
  return toFile(run(id, { createdAt, probes: [probe("x")] }), transcript);
}

describe("the history", () => {
  it("lists runs from the oldest to the newest, with their probes, and loads each whole", async () => {
    const history = await openHistory(new IDBFactory());
    await history.save(fileOf("b", 2));
    await history.save(fileOf("a", 1));
    const entries = await history.list();
    expect(entries.map(({ id }) => id)).toEqual(["a", "b"]);
    expect(entries[0]?.probes[0]?.name).toBe("x");
    expect(await history.load("b")).toEqual(fileOf("b", 2));
    expect(await history.load("gone")).toBeNull();
  });

  it("keeps the newest version of a run, and removes runs", async () => {
    const history = await openHistory(new IDBFactory());
    await history.save(fileOf("a", 1));
    await history.save({ ...fileOf("a", 1), lost: 3 });
    expect((await history.load("a"))?.lost).toBe(3);
    await history.remove(["a"]);
    expect(await history.list()).toEqual([]);
  });
});

it("forbidden storage is ignored", () => {
  const forbidden = safeStorage(() => {
    throw new DOMException("denied", "SecurityError");
  });
  forbidden.write("a", "b");
  expect(forbidden.read("a")).toBeNull();
});
