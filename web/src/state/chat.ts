// Starts, follows, stops and resumes runs, and keeps their status up to date.
import { ApiError, type Server } from "../api/http";
import { resumeRun, startRun, type Follower } from "../api/follow";
import type { RunEvent } from "../api/events";
import { fromFile, toFile } from "../data/runFile";
import type { History } from "./history";
import {
  nextQuestion,
  requestsOf,
  bodyOf,
  CHAT_PATH,
  draftFaults,
  isPair,
  messagesOf,
  type RequestParts,
} from "./request";
import type { TranscriptStore } from "./transcriptStore";
import { changeRun, pathTo, putRun, type Store } from "./store";
import { RUNNING, type Run, type RunStatus } from "./types";

/** How long to wait for the last scores of a stopped run. */
const DRAIN_MS = 1500;

export class Chat {
  #controllers = new Map<string, AbortController>();

  constructor(
    private readonly server: Server,
    private readonly store: Store,
    private readonly transcripts: TranscriptStore,
    private readonly history: History,
    private readonly newId: () => string,
    private readonly now: () => number,
  ) {}

  /** Ask the draft's question after the shown conversation; in a comparison, in place of what is compared. */
  async send(): Promise<void> {
    const { draft } = this.store.getState();
    const { parent, user } = nextQuestion(this.store.getState());
    if (user === "" || this.#isFaulty()) return;
    this.store.setState({ draft: { ...draft, user: "" } });
    await this.#begin(parent, user, isPair(draft));
  }

  /** Ask the same question again; the first answer stays in the history. */
  async regenerate(id: string): Promise<void> {
    const run = this.store.getState().runs[id];
    if (run) await this.#begin(run.parent, run.user, false);
  }

  /** Ask another question in place of this one. */
  async edit(id: string, user: string): Promise<void> {
    const run = this.store.getState().runs[id];
    if (run && user.trim() !== "") await this.#begin(run.parent, user.trim(), false);
  }

  startOver(): void {
    this.store.setState({ head: null, versus: null, span: null });
  }

  async stop(id: string): Promise<void> {
    const run = this.store.getState().runs[id];
    const controller = this.#controllers.get(id);
    if (!run || !controller) return;
    changeRun(this.store, id, { status: "stopped" });
    if (run.serverRun === null) {
      controller.abort();
      return;
    }
    const giveUp = setTimeout(() => controller.abort(), DRAIN_MS);
    controller.signal.addEventListener("abort", () => clearTimeout(giveUp));
    await this.server.ask(`v1/runs/${run.serverRun}`, { method: "DELETE" }).catch(() => controller.abort());
  }

  /** Load the transcripts of a conversation that are only in the history. */
  async open(id: string): Promise<void> {
    const path = pathTo(this.store.getState().runs, id);
    await Promise.all(path.map((run) => this.#load(run.id)));
  }

  /** Resume a run that was still going when the page was closed. */
  async resume(run: Run): Promise<void> {
    const { serverRun } = run;
    if (serverRun === null) {
      changeRun(this.store, run.id, { status: "interrupted" });
      return;
    }
    this.transcripts.drop(run.id);
    changeRun(this.store, run.id, { status: "reconnecting" });
    await this.#follow(run.id, (follower, signal) => resumeRun(this.server, serverRun, follower, signal));
  }

  async #begin(parent: string | null, user: string, isPairWanted: boolean): Promise<void> {
    const { draft, model } = this.store.getState();
    if (model === null || this.#isFaulty()) return;
    const asks = requestsOf(draft, isPairWanted);
    const runs = asks.map((asked) => this.#newRun(parent, user, model, asked));
    if (parent !== null) await this.open(parent);
    for (const run of runs) putRun(this.store, run);
    // The plain run is A, so that the difference B - A is the effect of steering.
    const [first, second] = runs;
    this.store.setState({ head: first?.id ?? null, versus: second?.id ?? null, span: null });
    await Promise.all(runs.map((run) => this.#start(run)));
  }

  /** A draft with faults is never sent, neither with steering nor without. */
  #isFaulty(): boolean {
    const [fault] = draftFaults(this.store.getState());
    if (fault !== undefined) this.store.setState({ notice: `Not asked. ${fault}` });
    return fault !== undefined;
  }

  #newRun(parent: string | null, user: string, model: string, asked: Omit<RequestParts, "model">): Run {
    const { draft, probes } = this.store.getState();
    return {
      id: this.newId(),
      parent,
      createdAt: this.now(),
      serverRun: null,
      model,
      system: draft.system,
      user,
      ...asked,
      probes: probes ?? [],
      status: "opening",
      error: null,
    };
  }

  async #start(run: Run): Promise<void> {
    const path = pathTo(this.store.getState().runs, run.id);
    const answers = path.slice(0, -1).map(({ id }) => this.transcripts.get(id).text);
    const body = bodyOf(run, messagesOf(path, answers));
    await this.#follow(run.id, (follower, signal) =>
      startRun(this.server, CHAT_PATH, body, follower, signal),
    );
  }

  async #follow(id: string, work: (follower: Follower, signal: AbortSignal) => Promise<void>): Promise<void> {
    const controller = new AbortController();
    this.#controllers.set(id, controller);
    try {
      await work(this.#follower(id), controller.signal);
      this.#setStatus(id, "done");
    } catch (error) {
      this.#fail(id, error, controller.signal.aborted);
    } finally {
      this.#controllers.delete(id);
      await this.#save(id);
    }
  }

  #follower(id: string): Follower {
    return {
      opened: (serverRun) => {
        changeRun(this.store, id, { serverRun });
        void this.#save(id);
      },
      event: (event) => this.#apply(id, event),
      retrying: (attempt) => this.#setStatus(id, attempt > 0 ? "reconnecting" : "streaming"),
    };
  }

  #apply(id: string, event: RunEvent): void {
    if (event.kind === "error") {
      const { message } = event.data.error;
      this.#setStatus(id, "failed");
      if (this.#status(id) === "failed") changeRun(this.store, id, { error: message });
    }
    this.transcripts.get(id).apply(event);
    this.transcripts.notify(id);
    if (event.kind === "token" || event.kind === "probe_update") this.#setStatus(id, "streaming");
  }

  #status(id: string): RunStatus | undefined {
    return this.store.getState().runs[id]?.status;
  }

  /** A stopped or failed run keeps its status, whatever still arrives. */
  #setStatus(id: string, status: RunStatus): void {
    const current = this.#status(id);
    if (current === undefined || current === status || !RUNNING.has(current)) return;
    changeRun(this.store, id, { status });
  }

  #fail(id: string, error: unknown, wasAborted: boolean): void {
    if (wasAborted && this.#status(id) === "stopped") return;
    if (error instanceof ApiError && error.status === 401) {
      this.store.setState({ key: { isNeeded: true, wasRefused: true } });
    }
    const hasTokens = this.transcripts.get(id).length > 0;
    this.#setStatus(id, hasTokens ? "interrupted" : "failed");
    changeRun(this.store, id, { error: error instanceof Error ? error.message : String(error) });
  }

  async #load(id: string): Promise<void> {
    if (this.transcripts.has(id)) return;
    const file = await this.history.load(id);
    if (file) this.transcripts.put(id, fromFile(file).transcript);
  }

  async #save(id: string): Promise<void> {
    const run = this.store.getState().runs[id];
    if (!run) return;
    try {
      await this.history.save(toFile(run, this.transcripts.get(id)));
    } catch {
      // The browser's storage is full or gone; the run is still shown.
      this.store.setState({
        notice: "This run could not be saved in the history: the browser's storage is full.",
      });
    }
  }
}
