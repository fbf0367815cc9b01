// Takes work to do; gives each piece one turn in the next animation frame, however often it was asked.

export class Beat {
  #pending = new Set<() => void>();
  #isAsked = false;

  constructor(private readonly nextFrame: (callback: () => void) => unknown) {}

  /** Run `work` once in the next frame; the same function asked twice runs once. */
  ask(work: () => void): void {
    this.#pending.add(work);
    if (this.#isAsked) return;
    this.#isAsked = true;
    this.nextFrame(() => this.#run());
  }

  #run(): void {
    const works = [...this.#pending];
    this.#pending.clear();
    this.#isAsked = false;
    for (const work of works) work();
  }
}
