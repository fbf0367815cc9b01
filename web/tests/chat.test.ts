import { describe, expect, it } from "vitest";
import type { RunEvent } from "../src/api/events";
import { createServer } from "../src/api/http";
import type { RunFile } from "../src/data/runFile";
import { freshEntry } from "../src/data/entryDraft";
import { FrameQueue } from "../src/state/frameQueue";
import { Chat } from "../src/state/chat";
import { noHistory, type History } from "../src/state/history";
import { TranscriptStore } from "../src/state/transcriptStore";
import { createPageStore, pathTo } from "../src/state/store";
import { body, DONE, frame, opened, probe, run, scripted, token } from "./wire";

function memory(): History & { files: Map<string, RunFile> } {
  const files = new Map<string, RunFile>();
  return {
    ...noHistory(),
    files,
    load: (id) => Promise.resolve(files.get(id) ?? null),
    save: (file) => Promise.resolve(void files.set(file.run.id, structuredClone(file))),
  };
}

function pageWith(server: ReturnType<typeof scripted>) {
  const store = createPageStore({ model: "m", probes: [probe("x")] });
  const transcripts = new TranscriptStore(new FrameQueue(() => undefined));
  const history = memory();
  let id = 0;
  const newId = () => `run${++id}`;
  const chat = new Chat(server, store, transcripts, history, newId, () => id);
  const ask = async (user: string) => {
    store.setState((state) => ({ draft: { ...state.draft, user } }));
    await chat.send();
  };
  const head = () => store.getState().runs[store.getState().head ?? ""];
  return { store, transcripts, history, chat, ask, head };
}

const answer = (...words: string[]) =>
  opened(body(...words.map((word, i) => frame(i + 1, token(i, word))), frame(words.length + 1, DONE)));

describe("a question", () => {
  it("becomes a run with tokens and an end, saved in the history", async () => {
    const page = pageWith(scripted(answer("Be", "cause")));
    await page.ask("  Why?  ");
    expect(page.head()).toMatchObject({ user: "Why?", status: "done", serverRun: "r1", error: null });
    expect(page.transcripts.get("run1").text).toBe("Because");
    expect(page.history.files.get("run1")?.text).toBe("Because");
    expect(page.store.getState().draft.user).toBe("");
  });

  it("that is empty is not asked", async () => {
    const server = scripted();
    await pageWith(server).ask("   ");
    expect(server.asked).toEqual([]);
  });

  it("remembers the probes as they were", async () => {
    const page = pageWith(scripted(answer("a")));
    await page.ask("Why?");
    page.store.setState({ probes: [probe("x", { threshold: 0.9 })] });
    expect(page.head()?.probes[0]?.threshold).toBe(0.5);
  });

  it("after another continues the conversation", async () => {
    const page = pageWith(scripted(answer("a"), answer("b")));
    await page.ask("One");
    await page.ask("Two");
    const { runs, head } = page.store.getState();
    expect(pathTo(runs, head).map(({ user }) => user)).toEqual(["One", "Two"]);
  });

  it("asked again becomes a sibling of the first answer", async () => {
    const page = pageWith(scripted(answer("a"), answer("b"), answer("c")));
    await page.ask("One");
    await page.chat.regenerate("run1");
    expect(page.head()).toMatchObject({ id: "run2", parent: null, user: "One" });
    await page.chat.edit("run2", "Other");
    expect(page.head()).toMatchObject({ id: "run3", parent: null, user: "Other" });
    expect(Object.keys(page.store.getState().runs)).toHaveLength(3);
  });

  it("that is refused shows the reason", async () => {
    const error = { error: { message: "max_tokens is too large", type: "x", param: null, code: null } };
    const page = pageWith(scripted(() => new Response(JSON.stringify(error), { status: 400 })));
    await page.ask("Why?");
    expect(page.head()).toMatchObject({ status: "failed", error: "max_tokens is too large" });
  });

  it("with a wrong key asks for another key", async () => {
    const page = pageWith(scripted(() => new Response("{}", { status: 401 })));
    await page.ask("Why?");
    expect(page.store.getState().key).toEqual({ isNeeded: true, wasRefused: true });
  });

  it("whose run fails on the server keeps its tokens and the reason", async () => {
    const failure = { error: { message: "the engine died", type: "x", param: null, code: null } };
    const stream = body(frame(1, token(0, "a")), frame(2, { kind: "error", data: failure }));
    const page = pageWith(scripted(opened(stream)));
    await page.ask("Why?");
    expect(page.head()).toMatchObject({ status: "failed", error: "the engine died" });
    expect(page.transcripts.get("run1").tokens).toEqual(["a"]);
  });

  it("whose events violate the protocol is interrupted and keeps its tokens", async () => {
    const page = pageWith(scripted(opened(body(frame(1, token(0, "a")), frame(2, token(5, "z"))))));
    await page.ask("Why?");
    expect(page.head()?.status).toBe("interrupted");
    expect(page.head()?.error).toContain("1 was expected");
  });
});

describe("a question asked with and without steering", () => {
  const ON = {
    kind: "on" as const,
    vectors: [
      {
        name: "joy",
        points: ["post_block.1"],
        width: 1,
        digest: "d",
        norms: [1],
        description: null,
        method: null,
        scale: 2,
      },
    ],
    points: ["post_block.1"],
    tiers: { base: [], prefill: [], decode: [] },
  };

  function steeredPage(server: ReturnType<typeof scripted>) {
    const page = pageWith(server);
    const { draft } = page.store.getState();
    page.store.setState({
      steering: ON,
      draft: { ...draft, entries: [freshEntry(1, { name: "joy", scale: 2 })] },
    });
    return page;
  }

  it("is two runs at once, the plain one first, with the same parent", async () => {
    const page = steeredPage(scripted(answer("a"), answer("b")));
    await page.ask("Why?");
    const { runs, head, versus } = page.store.getState();
    expect([head, versus]).toEqual(["run1", "run2"]);
    expect(runs.run1).toMatchObject({ steer: [], status: "done", sampling: { seed: 1 } });
    expect(runs.run2).toMatchObject({
      steer: [{ vector: "joy", scale: 2, op: "add" }],
      parent: null,
      status: "done",
      sampling: { seed: 1 },
    });
    expect([page.transcripts.get("run1").text, page.transcripts.get("run2").text]).toEqual(["a", "b"]);
  });

  it("is asked again in the same place, with the same text if none was typed", async () => {
    const page = steeredPage(scripted(answer("a"), answer("b"), answer("c"), answer("d")));
    await page.ask("Why?");
    await page.ask("");
    const { runs, head, versus } = page.store.getState();
    expect([head, versus]).toEqual(["run3", "run4"]);
    expect(runs.run4).toMatchObject({ user: "Why?", parent: null });
  });

  it("keeps what the engine applied, in its file too", async () => {
    const applied = [{ vector: "joy", scale: 2, op: "add" as const, digest: "abc" }];
    const told: RunEvent = { kind: "steering", data: { clairai: { steering: applied } } };
    const stream = opened(body(frame(1, told), frame(2, token(0, "b")), frame(3, DONE)));
    const page = steeredPage(scripted(answer("a"), stream));
    await page.ask("Why?");
    expect(page.transcripts.get("run1").echo).toBeNull();
    expect(page.transcripts.get("run2").echo?.steering).toEqual(applied);
    expect(page.history.files.get("run2")?.echo?.steering).toEqual(applied);
  });

  it("is not asked while it has a fault, and its text stays", async () => {
    const server = scripted(answer("a"));
    const page = steeredPage(server);
    page.store.setState({ steering: { kind: "off", reason: null } });
    await page.ask("Why?");
    expect(server.asked).toEqual([]);
    expect(page.store.getState().notice).toContain("Not asked");
    expect(page.store.getState().draft.user).toBe("Why?");
  });

  it("ends the comparison when no steering is left", async () => {
    const page = steeredPage(scripted(answer("a"), answer("b"), answer("c")));
    await page.ask("Why?");
    const { draft } = page.store.getState();
    page.store.setState({ draft: { ...draft, entries: [] } });
    await page.ask("And now?");
    expect(page.store.getState().versus).toBeNull();
    expect(page.head()).toMatchObject({ user: "And now?", parent: null, steer: [] });
  });
});

it("a full history gives a notice, and the run is still shown", async () => {
  const page = pageWith(scripted(answer("a")));
  page.history.save = () => Promise.reject(new DOMException("full", "QuotaExceededError"));
  await page.ask("Why?");
  expect(page.head()?.status).toBe("done");
  expect(page.store.getState().notice).toContain("storage is full");
});

describe("stopping", () => {
  it("deletes the run and keeps what still arrives", async () => {
    let controller: ReadableStreamDefaultController<Uint8Array> | undefined;
    const stream = new ReadableStream<Uint8Array>({ start: (made) => void (controller = made) });
    const write = (text: string) => controller?.enqueue(new TextEncoder().encode(text));
    const server = scripted(opened(stream), () => new Response(null, { status: 204 }));
    const page = pageWith(server);
    const asking = page.ask("Why?");
    write(frame(1, token(0, "a")));
    await new Promise((resolve) => setTimeout(resolve, 0));
    await page.chat.stop("run1");
    expect(page.head()?.status).toBe("stopped");
    write(frame(2, token(1, "b")) + frame(3, DONE));
    await asking;
    expect(server.asked.at(-1)).toEqual({ path: "v1/runs/r1", method: "DELETE" });
    expect(page.transcripts.get("run1").tokens).toEqual(["a", "b"]);
    expect(page.head()?.status).toBe("stopped");
  });

  it("does nothing for a run that has ended", async () => {
    const server = scripted(answer("a"));
    const page = pageWith(server);
    await page.ask("Why?");
    await page.chat.stop("run1");
    expect(page.head()?.status).toBe("done");
    expect(server.asked).toHaveLength(1);
  });
});

describe("an earlier run", () => {
  it("that was still running is resumed from its first event", async () => {
    const page = pageWith(scripted(answer("a", "b")));
    const old = run("old", { serverRun: "r7", status: "streaming" });
    page.store.setState({ runs: { old }, head: "old" });
    await page.chat.resume(old);
    expect(page.head()?.status).toBe("done");
    expect(page.transcripts.get("old").text).toBe("ab");
  });

  it("that the server no longer holds becomes interrupted", async () => {
    const page = pageWith(scripted(() => new Response("{}", { status: 404 })));
    const old = run("old", { serverRun: "r7", status: "streaming" });
    page.store.setState({ runs: { old }, head: "old" });
    await page.chat.resume(old);
    expect(page.head()?.error).toBe("The server no longer holds this run.");
    expect(page.head()?.status).not.toBe("streaming");
  });

  it("is loaded when its conversation is shown", async () => {
    const page = pageWith(scripted(answer("a")));
    await page.ask("Why?");
    page.transcripts.drop("run1");
    expect(page.transcripts.get("run1").text).toBe(""); // read before it is loaded
    await page.chat.open("run1");
    expect(page.transcripts.get("run1").text).toBe("a");
  });
});

it("an unreachable server is distinguished from one that refuses", async () => {
  const server = createServer("http://127.0.0.1:9/", () => "key");
  await expect(server.ask("health")).rejects.toThrow("does not respond");
});
