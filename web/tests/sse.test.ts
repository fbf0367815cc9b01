import { describe, expect, it } from "vitest";
import { frames, SilenceError } from "../src/api/sse";
import { body } from "./wire";

async function collected(stream: ReadableStream<Uint8Array>): Promise<string[]> {
  const found: string[] = [];
  for await (const { id, event, data } of frames(stream)) found.push(`${id ?? ""}|${event ?? ""}|${data}`);
  return found;
}

describe("frames of an event stream", () => {
  it("are complete however the bytes are split", async () => {
    const text = "id: 1\nevent: token\ndata: {}\n\nid: 2\nevent: done\ndata: 7\n\n";
    for (let cut = 1; cut < text.length; cut += 1) {
      const found = await collected(body(text.slice(0, cut), text.slice(cut)));
      expect(found).toEqual(["1|token|{}", "2|done|7"]);
    }
  });

  it("keep characters whose bytes are split", async () => {
    const bytes = new TextEncoder().encode("id: 1\ndata: né 🙂\n\n");
    const stream = new ReadableStream<Uint8Array>({
      start(controller) {
        for (const byte of bytes) controller.enqueue(Uint8Array.of(byte));
        controller.close();
      },
    });
    expect(await collected(stream)).toEqual(["1||né 🙂"]);
  });

  it("do not include pings", async () => {
    expect(await collected(body(": ping\n\n", "id: 1\ndata: a\n\n", ": ping\n\n"))).toEqual(["1||a"]);
  });

  it("end with an error after too long a silence", async () => {
    const silent = new ReadableStream<Uint8Array>({ start: () => undefined });
    const read = async () => {
      for await (const each of frames(silent, 10)) expect(each).toBeUndefined();
    };
    await expect(read()).rejects.toBeInstanceOf(SilenceError);
  });
});
