// Writes a request as a Python program or a curl command.
import type { CompletionBody } from "../state/request";

/** Fields that the openai package does not know go into extra_body. */
const EXTRA = ["clairai", "top_k", "min_p", "repetition_penalty"] as const;

/** The first chunk reports the steering that was applied. */
const ECHO = [
  '    applied = getattr(chunk, "clairai", None)',
  "    if applied:",
  '        print(applied["steering"])',
];

/** Copies ask for OpenAI's own stream; only this page uses named events. */
function plain(body: CompletionBody): Record<string, unknown> {
  const clairai = Object.entries(body.clairai).filter(([key]) => key !== "events");
  return { ...body, clairai: Object.fromEntries(clairai) };
}

export function curl(body: CompletionBody, origin: string, hasKey: boolean): string {
  const key = hasKey ? ` \\\n  -H "Authorization: Bearer $CLAIRAI_API_KEY"` : "";
  const json = JSON.stringify(plain(body), null, 2).replaceAll("'", "'\\''");
  return `curl -N ${origin}/v1/chat/completions -H 'Content-Type: application/json'${key} \\\n  -d '${json}'\n`;
}

export function python(body: CompletionBody, origin: string, hasKey: boolean): string {
  const known = Object.entries(plain(body)).filter(([key]) => !isExtra(key));
  const extra = Object.fromEntries(Object.entries(plain(body)).filter(([key]) => isExtra(key)));
  const lines = known.map(([key, value]) => `    ${key}=${literal(value, 4)},`);
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(`${origin}/v1`, 0)}, api_key=${hasKey ? 'os.environ["CLAIRAI_API_KEY"]' : '"none"'})`,
    "stream = client.chat.completions.create(",
    ...lines,
    `    extra_body=${literal(extra, 4)},`,
    ")",
    "for chunk in stream:",
    ...(body.clairai.steer ? ECHO : []),
    "    for choice in chunk.choices:",
    '        print(choice.delta.content or "", end="", flush=True)',
    '        scores = getattr(choice, "probe_scores", None)',
    "        if scores:  # row j scores generated token start + j",
    '            print(scores["names"], scores["start"], scores["scores"])',
    "",
  ].join("\n");
}

function isExtra(key: string): boolean {
  return (EXTRA as readonly string[]).includes(key);
}

/** A JSON value as a Python literal; JSON strings are valid in Python. */
export function literal(value: unknown, indent: number): string {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value))
    return bracketed(
      "[",
      value.map((each) => literal(each, indent + 4)),
      "]",
      indent,
    );
  if (typeof value !== "object") return JSON.stringify(value);
  const entries = Object.entries(value).map(
    ([key, each]) => `${JSON.stringify(key)}: ${literal(each, indent + 4)}`,
  );
  return bracketed("{", entries, "}", indent);
}

function bracketed(open: string, items: string[], close: string, indent: number): string {
  const line = `${open}${items.join(", ")}${close}`;
  if (line.length + indent <= 88 && !line.includes("\n")) return line;
  const pad = " ".repeat(indent);
  return `${open}\n${items.map((item) => `${pad}    ${item},`).join("\n")}\n${pad}${close}`;
}
