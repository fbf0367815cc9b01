import { describe, expect, it } from "vitest";
import type { SteerEntry, StopRule } from "../src/api/steering";
import { fromFile, RunFileError, toFile, type RunFile } from "../src/data/runFile";
import { Transcript } from "../src/data/transcript";
import { csv } from "../src/export/csv";
import { closable, embedded, html } from "../src/export/html";
import { fileName } from "../src/export/save";
import { curl, literal, python } from "../src/export/snippets";
import { bodyOf, messagesOf, samplingFields } from "../src/state/request";
import { NO_SAMPLING } from "../src/state/types";
import { probe, prompt, run, token, update } from "./wire";

const HOSTILE = '</script><script>alert(1)</script><!-- "=1+1,\n';

function sample(): { file: RunFile; transcript: Transcript } {
  const transcript = new Transcript();
  transcript.apply(prompt(0, "<|im_start|>", HOSTILE));
  transcript.apply(update("prompt", 0, ["x", "y"], [0.1, -2.5]));
  transcript.apply(token(0, "a", "=2"));
  transcript.apply(update("answer", 0, ["x", "y"], [0.25, null]));
  return { transcript, file: toFile(run("r", { probes: [probe("x")], user: HOSTILE }), transcript) };
}

describe("a run as a file", () => {
  it("is read back as it was", () => {
    const { file, transcript } = sample();
    const back = fromFile(JSON.parse(JSON.stringify(file)) as RunFile);
    expect(toFile(back.run, back.transcript)).toEqual(file);
    expect(back.transcript.tokens).toEqual(transcript.tokens);
    expect(back.transcript.scores.hasArrived(1)).toBe(false);
    expect(back.transcript.scores.hasArrived(2)).toBe(true);
    expect(back.transcript.scores.value("y", 2)).toBeNaN();
  });

  it("keeps which tokens stand for an image or a sound", () => {
    const { transcript } = sample();
    const scored = update("prompt", 0, ["x", "y"], [0.1, -2.5]);
    const media = [
      { kind: "image" as const, start: 0, span: 1 },
      { kind: "audio" as const, start: 1, span: 1 },
    ];
    if (scored.kind === "probe_update") scored.data.media = media;
    transcript.apply(scored);
    const file = toFile(run("r"), transcript);
    expect(file.prompt.media).toEqual(media);
    expect([...fromFile(file).transcript.media.values()]).toEqual(["image", "audio"]);
    expect(sample().file.prompt.media).toBeUndefined();
  });

  it("saved before steering existed is read as one without steering", () => {
    const old = JSON.parse(JSON.stringify(sample().file)) as Record<string, Record<string, unknown>>;
    delete old.echo;
    delete old.run?.steer;
    delete old.run?.stop;
    const { run: back, transcript } = fromFile(old as unknown as RunFile);
    expect([back.steer, back.stop, transcript.echo]).toEqual([[], [], null]);
  });

  it("of another format is refused", () => {
    const other = { ...sample().file, format: "clairai-run/9" as "clairai-run/1" };
    expect(() => fromFile(other)).toThrow(RunFileError);
  });
});

describe("CSV", () => {
  const lines = csv(sample().file).split("\r\n");

  it("has one line per token, scores where they exist", () => {
    expect(lines[0]).toBe("part,index,token_id,token,x,y");
    expect(lines[1]).toBe('prompt,0,0,"""<|im_start|>""",0.1,-2.5');
    expect(lines[3]).toBe('answer,0,100,"""a""",0.25,');
    expect(lines[4]).toBe('answer,1,101,"""=2""",,');
    expect(lines).toHaveLength(6);
  });

  it("never turns a model's text into a spreadsheet formula", () => {
    for (const line of lines.slice(1, -1)) expect(line).toMatch(/^(prompt|answer),\d+,\d+,"""/);
  });
});

describe("the page in a file", () => {
  const text = html(
    { runs: [sample().file], probe: "x", lines: ["x"] },
    { script: "let a='</script>';", style: "p{}" },
    "'sha256-x'",
    HOSTILE,
  );

  it("cannot be escaped from by a model's text", () => {
    expect(text.match(/<\/script>/g)).toHaveLength(2);
    expect(text.match(/<script/g)).toHaveLength(2);
    expect(text.match(/<title>/g)).toHaveLength(1);
    expect(text).not.toContain("<!--");
  });

  it("contains the run unchanged", () => {
    const json = /id="saved-runs">(.*?)<\/script>/s.exec(text)?.[1] ?? "";
    expect(JSON.parse(json)).toEqual({ runs: [sample().file], probe: "x", lines: ["x"] });
  });

  it("cannot load anything from outside", () => {
    expect(text).toContain("default-src 'none'; script-src 'sha256-x'");
    expect(text).not.toContain("connect-src");
  });

  it("keeps the meaning of a script whose text is escaped", () => {
    expect(closable("x='<script>'+'</SCRIPT>'+'<!--'")).toBe("x='\\x3cscript>'+'\\x3c/SCRIPT>'+'\\x3c!--'");
    expect(JSON.parse(embedded("<\u2028>"))).toBe("<\u2028>");
    expect(embedded("<\u2028>")).not.toMatch(/[<\u2028]/);
  });
});

describe("a request", () => {
  const first = run("a", { user: "Hi", system: "old" });
  const second = run("b", {
    parent: "a",
    user: 'It\'s "quoted"\nTwice',
    system: "Be kind",
    sampling: { ...NO_SAMPLING, top_k: 5, temperature: 0, stop: ["\n"] },
  });
  const body = bodyOf(second, messagesOf([first, second], ["Hello"]));

  it("carries the conversation with the newest system prompt", () => {
    expect(body.messages.map(({ role, content }) => [role, content])).toEqual([
      ["system", "Be kind"],
      ["user", "Hi"],
      ["assistant", "Hello"],
      ["user", 'It\'s "quoted"\nTwice'],
    ]);
  });

  it("omits what was not set", () => {
    expect(samplingFields(NO_SAMPLING)).toEqual({ max_tokens: 256 });
    expect(body).toMatchObject({ temperature: 0, top_k: 5, stop: ["\n"] });
    expect("seed" in body).toBe(false);
    expect(messagesOf([first], [])).toHaveLength(2);
    expect(messagesOf([run("x", { system: "  " })], [])).toHaveLength(1);
  });

  it("is copied as curl with all quotes escaped for a shell", () => {
    const text = curl(body, "http://h:1", true);
    expect(text).toContain("It'\\''s");
    expect(text).toContain("$CLAIRAI_API_KEY");
    expect(text).not.toContain("named");
  });

  it("is copied as Python with fields unknown to the package in extra_body", () => {
    const text = python(body, "http://h:1", false);
    expect(text).toContain('base_url="http://h:1/v1", api_key="none"');
    expect(text).toContain('extra_body={"top_k": 5, "clairai": {"probes": "all", "prompt_scores": True}}');
    expect(text).toContain("    stream=True,");
    expect(text).not.toMatch(/^ {4}top_k=/m);
  });

  it("that steers is copied with its steering, and Python prints what was applied", () => {
    const steer: SteerEntry[] = [{ vector: "joy", scale: 2, op: "add" }];
    const stop: StopRule[] = [{ probe: "x", tokens: 3, action: "stop" }];
    const steered = bodyOf(run("s", { steer, stop }), []);
    expect(curl(steered, "http://h:1", false)).toContain('"vector": "joy"');
    const text = python(steered, "http://h:1", false);
    expect(text).toContain('"steer": [{"vector": "joy", "scale": 2, "op": "add"}]');
    expect(text).toContain('print(applied["steering"])');
    expect(python(body, "http://h:1", false)).not.toContain("applied");
  });

  it("is written with Python's literals instead of JSON's", () => {
    expect(literal([null, true, false, 1.5, "a\n"], 0)).toBe('[None, True, False, 1.5, "a\\n"]');
  });
});

it("a file is named after its question", () => {
  expect(fileName("Why is the sky blue?", "csv")).toBe("clairai-why-is-the-sky-blue.csv");
  expect(fileName("../../etc/passwd", "json")).toBe("clairai-etc-passwd.json");
  expect(fileName("你好", "png")).toBe("clairai-run.png");
});
