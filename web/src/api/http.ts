// Calls the server; a failed call becomes an error with the server's own message.
import type { ErrorDetail } from "./types";

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
    this.name = "ApiError";
  }
}

/** The server could not be reached at all. */
export class UnreachableError extends Error {
  constructor() {
    super("The server does not respond. Is it still running?");
    this.name = "UnreachableError";
  }
}

export interface Call {
  method?: "GET" | "POST" | "DELETE";
  body?: unknown;
  headers?: Record<string, string>;
  signal?: AbortSignal;
}

export interface Server {
  /** The response, whatever its status. */
  ask(path: string, call?: Call): Promise<Response>;
  /** The JSON of a successful response; throws ApiError for any other. */
  json<T>(path: string, call?: Call): Promise<T>;
}

export function createServer(base: string, key: () => string | null): Server {
  async function ask(path: string, call: Call = {}): Promise<Response> {
    const headers: Record<string, string> = { ...call.headers };
    const secret = key();
    if (secret !== null) headers.Authorization = `Bearer ${secret}`;
    if (call.body !== undefined) headers["Content-Type"] = "application/json";
    try {
      return await fetch(new URL(path, base), {
        method: call.method ?? "GET",
        headers,
        cache: "no-store",
        ...(call.body === undefined ? {} : { body: JSON.stringify(call.body) }),
        ...(call.signal ? { signal: call.signal } : {}),
      });
    } catch (error) {
      if (call.signal?.aborted) throw error;
      throw new UnreachableError();
    }
  }
  return {
    ask,
    async json<T>(path: string, call?: Call): Promise<T> {
      const answer = await ask(path, call);
      if (!answer.ok) throw await refusal(answer);
      return (await answer.json()) as T;
    },
  };
}

/** The error in a response, read from OpenAI's error object if there is one. */
export async function refusal(answer: Response): Promise<ApiError> {
  const text = await answer.text();
  return new ApiError(answer.status, messageOf(text) ?? `The server responded with status ${answer.status}.`);
}

function messageOf(text: string): string | null {
  try {
    const body = JSON.parse(text) as { error?: Partial<ErrorDetail> } | null;
    const message = body?.error?.message;
    return typeof message === "string" ? message : null;
  } catch {
    return null;
  }
}
