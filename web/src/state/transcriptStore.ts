// Holds the transcripts of runs, and notifies listeners of changes at most once a frame.
import { Transcript } from "../data/transcript";
import type { FrameQueue } from "./frameQueue";

export class TranscriptStore {
  #transcripts = new Map<string, Transcript>();
  #listeners = new Map<string, Set<() => void>>();
  #notifiers = new Map<string, () => void>();

  constructor(private readonly frames: FrameQueue) {}

  get(id: string): Transcript {
    let transcript = this.#transcripts.get(id);
    if (!transcript) {
      transcript = new Transcript();
      this.#transcripts.set(id, transcript);
    }
    return transcript;
  }

  /** Whether the transcript has any content; `get` creates an empty one. */
  has(id: string): boolean {
    return (this.#transcripts.get(id)?.version ?? 0) > 0;
  }

  put(id: string, transcript: Transcript): void {
    this.#transcripts.set(id, transcript);
    this.notify(id);
  }

  drop(id: string): void {
    this.#transcripts.delete(id);
  }

  notify(id: string): void {
    this.frames.schedule(this.#notifier(id));
  }

  subscribe(id: string, listener: () => void): () => void {
    const listeners = this.#listeners.get(id) ?? new Set();
    this.#listeners.set(id, listeners);
    listeners.add(listener);
    return () => void listeners.delete(listener);
  }

  #notifier(id: string): () => void {
    const known = this.#notifiers.get(id);
    if (known) return known;
    const work = () => this.#listeners.get(id)?.forEach((listener) => listener());
    this.#notifiers.set(id, work);
    return work;
  }
}
