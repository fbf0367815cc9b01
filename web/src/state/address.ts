// Keeps the view in the URL's fragment, which the browser never sends to a server.
import { MAX_LINES } from "../colour/lines";
import type { TokenRef } from "../data/transcript";
import { ruleDraftOf } from "../data/rules";
import { draftOf, MAX_ENTRIES } from "../data/entryDraft";
import { NO_SAMPLING, type Draft, type Pane, type Run, type Sampling, type State } from "./types";

/** The part of a run that a link carries to a browser that does not have the run. */
export type Question = Pick<Run, "system" | "user" | "sampling" | "steer" | "stop">;
/** The fields of the draft that a link sets. */
export type LinkedDraft = Pick<Draft, "system" | "user" | "sampling" | "entries" | "rules">;

export interface Address {
  run: string | null;
  versus: string | null;
  probe: string | null;
  lines: string[] | null;
  at: TokenRef | null;
  pane: Pane | null;
  hasMarkdown: boolean;
  hasMarks: boolean;
  hasMono: boolean;
  question: LinkedDraft | null;
}

const PANES: readonly Pane[] = ["chat", "charts", "probes", "steer", "history", "crossings"];
const MAX_QUESTION = 6000;
const MAX_NAME = 200;

export function addressOf(state: State, at: TokenRef | null, question: Question | null): string {
  const parts = new URLSearchParams();
  if (state.head) parts.set("run", state.head);
  if (state.versus) parts.set("vs", state.versus);
  if (state.probe) parts.set("probe", state.probe);
  for (const line of state.lines) parts.append("line", line);
  if (at) parts.set("at", `${at.part === "prompt" ? "p" : "a"}${at.index}`);
  if (state.pane !== "chat") parts.set("pane", state.pane);
  if (state.hasMarkdown) parts.set("md", "1");
  if (state.hasMarks) parts.set("ws", "1");
  if (state.hasMono) parts.set("mono", "1");
  const asked = question ? JSON.stringify(question) : "";
  if (asked && asked.length <= MAX_QUESTION) parts.set("ask", asked);
  const text = parts.toString();
  return text === "" ? "" : `#${text}`;
}

/** Anything invalid is ignored: anyone can type an address. */
export function parseAddress(hash: string): Address {
  const parts = new URLSearchParams(hash.replace(/^#/, ""));
  const lines = parts
    .getAll("line")
    .map(named)
    .filter((name) => name !== null);
  return {
    run: named(parts.get("run")),
    versus: named(parts.get("vs")),
    probe: named(parts.get("probe")),
    lines: lines.length > 0 ? [...new Set(lines)].slice(0, MAX_LINES) : null,
    at: tokenRefOf(parts.get("at")),
    pane: PANES.find((pane) => pane === parts.get("pane")) ?? null,
    hasMarkdown: parts.get("md") === "1",
    hasMarks: parts.get("ws") === "1",
    hasMono: parts.get("mono") === "1",
    question: questionOf(parts.get("ask")),
  };
}

function named(text: string | null): string | null {
  return text !== null && text !== "" && text.length <= MAX_NAME ? text : null;
}

function tokenRefOf(text: string | null): TokenRef | null {
  const match = /^([pa])(\d{1,7})$/.exec(text ?? "");
  if (!match) return null;
  return { part: match[1] === "p" ? "prompt" : "answer", index: Number(match[2]) };
}

function questionOf(text: string | null): LinkedDraft | null {
  if (text === null || text.length > MAX_QUESTION) return null;
  try {
    return checked(JSON.parse(text) as Partial<Record<keyof Question, unknown>> | null);
  } catch {
    return null;
  }
}

function checked(found: Partial<Record<keyof Question, unknown>> | null): LinkedDraft | null {
  if (typeof found?.user !== "string") return null;
  const system = typeof found.system === "string" ? found.system : "";
  return {
    user: found.user,
    system,
    sampling: samplingOf(found.sampling),
    entries: listed(found.steer).flatMap((each, i) => draftOf(i + 1, each) ?? []),
    rules: listed(found.stop).flatMap((each, i) => ruleDraftOf(i + 1, each) ?? []),
  };
}

function listed(found: unknown): unknown[] {
  return Array.isArray(found) ? found.slice(0, MAX_ENTRIES) : [];
}

function samplingOf(found: unknown): Sampling {
  if (typeof found !== "object" || found === null) return NO_SAMPLING;
  const given = found as Record<string, unknown>;
  const read: Sampling = { ...NO_SAMPLING };
  for (const key of Object.keys(NO_SAMPLING) as (keyof Sampling)[]) {
    const value = given[key];
    if (key === "stop") read.stop = Array.isArray(value) ? value.filter((s) => typeof s === "string") : [];
    else if (value === null || (typeof value === "number" && Number.isFinite(value))) read[key] = value;
  }
  return read;
}
