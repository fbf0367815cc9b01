// Takes a conversation and settings; gives the body of the request, the same for the page and for copies.
import type { ClairaiFields, Message } from "../api/types";
import type { Run, Sampling } from "./types";

export interface CompletionBody {
  model: string;
  messages: Message[];
  stream: true;
  clairai: ClairaiFields;
  [setting: string]: unknown;
}

export const CHAT_PATH = "v1/chat/completions";

/** `answers[i]` is what the model said in `path[i]`; the last run of the path is the one to make. */
export function messagesOf(path: readonly Run[], answers: readonly string[]): Message[] {
  const last = path.at(-1);
  if (!last) return [];
  const before = path.slice(0, -1).flatMap((run, i): Message[] => [
    { role: "user", content: run.user },
    { role: "assistant", content: answers[i] ?? "" },
  ]);
  const system: Message[] = last.system.trim() === "" ? [] : [{ role: "system", content: last.system }];
  return [...system, ...before, { role: "user", content: last.user }];
}

export function bodyOf(run: Run, messages: Message[]): CompletionBody {
  return {
    model: run.model,
    messages,
    stream: true,
    ...sent(run.sampling),
    clairai: { probes: "all", prompt_scores: true, events: "named" },
  };
}

/** Only what was set: the rest is the server's to decide. */
export function sent(sampling: Sampling): Partial<Sampling> {
  const entries = Object.entries(sampling).filter(
    ([, value]) => value !== null && !(Array.isArray(value) && value.length === 0),
  );
  return Object.fromEntries(entries);
}
