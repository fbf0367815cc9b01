// Runs scheduled functions once in the next animation frame, however often they were scheduled.

export class FrameQueue {
  #pending = new Set<() => void>();
  #isScheduled = false;

  constructor(private readonly nextFrame: (callback: () => void) => unknown) {}

  /** Run `work` in the next frame; a function scheduled twice runs once. */
  schedule(work: () => void): void {
    this.#pending.add(work);
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    this.nextFrame(() => this.#run());
  }

  #run(): void {
    const works = [...this.#pending];
    this.#pending.clear();
    this.#isScheduled = false;
    for (const work of works) work();
  }
}
