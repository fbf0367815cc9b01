import { describe, expect, it } from "vitest";
import { decode, isLast, ProtocolError } from "../src/api/events";

describe("an event", () => {
  it("with more texts than ids is refused", () => {
    const text = JSON.stringify({
      part: "answer",
      choice: 0,
      start: 0,
      token_ids: [1],
      tokens: ["a", "b"],
      text: "",
    });
    expect(() => decode("token", text)).toThrow(ProtocolError);
  });

  it("with a row of the wrong width is refused", () => {
    const text = JSON.stringify({ part: "answer", choice: 0, start: 0, names: ["x", "y"], scores: [[1]] });
    expect(() => decode("probe_update", text)).toThrow("1 scores for 2 probes");
  });

  it("that is not JSON is refused", () => {
    expect(() => decode("token", "{")).toThrow(ProtocolError);
  });

  it("of an unknown kind is ignored", () => {
    expect(decode("weather", "{}")).toBeNull();
  });

  it("that reports an error without a message gets a default one", () => {
    const event = decode("error", "{}");
    expect(event?.kind === "error" && event.data.error.message).toBe("The run failed.");
    expect(event && isLast(event)).toBe(true);
  });
});
