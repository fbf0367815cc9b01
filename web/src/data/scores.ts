// The scores of a run: one growing column of numbers per probe.

/** Kept outside React: rows arrive faster than components should render. */
export class ScoreTable {
  readonly names: string[] = [];
  length = 0;
  #columns: Float64Array[] = [];
  #arrived = new Uint8Array(0);
  #index = new Map<string, number>();
  #capacity = 0;

  /** The scores of one probe, one per token; NaN where there is none. */
  column(name: string): Float64Array {
    const at = this.#index.get(name);
    const column = at === undefined ? undefined : this.#columns[at];
    return column ? column.subarray(0, this.length) : new Float64Array(this.length).fill(NaN);
  }

  value(name: string, row: number): number {
    const at = this.#index.get(name);
    return at === undefined ? NaN : (this.#columns[at]?.[row] ?? NaN);
  }

  /** Whether the server has sent this row, even if all its scores are null. */
  hasArrived(row: number): boolean {
    return this.#arrived[row] === 1;
  }

  /** Make room for `count` rows in total; new rows count as not arrived. */
  extend(count: number): void {
    if (count > this.#capacity) this.#grow(Math.max(256, count, 2 * this.#capacity));
    if (count > this.length) this.length = count;
  }

  put(row: number, names: readonly string[], values: readonly (number | null)[]): void {
    this.extend(row + 1);
    this.#arrived[row] = 1;
    for (const [i, name] of names.entries()) {
      const column = this.#columns[this.#place(name)];
      if (column) column[row] = values[i] ?? NaN;
    }
  }

  /** Insert `count` empty rows at row `at`. */
  insert(at: number, count: number): void {
    const old = this.length;
    this.extend(old + count);
    for (const column of this.#columns) {
      column.copyWithin(at + count, at, old);
      column.fill(NaN, at, at + count);
    }
    this.#arrived.copyWithin(at + count, at, old);
    this.#arrived.fill(0, at, at + count);
  }

  /** Make columns for `names` even if they never get a row. */
  declare(names: readonly string[]): void {
    for (const name of names) this.#place(name);
  }

  #place(name: string): number {
    const known = this.#index.get(name);
    if (known !== undefined) return known;
    const at = this.names.length;
    this.names.push(name);
    this.#columns.push(new Float64Array(this.#capacity).fill(NaN));
    this.#index.set(name, at);
    return at;
  }

  #grow(capacity: number): void {
    this.#columns = this.#columns.map((old) => {
      const column = new Float64Array(capacity).fill(NaN);
      column.set(old);
      return column;
    });
    const arrived = new Uint8Array(capacity);
    arrived.set(this.#arrived);
    this.#arrived = arrived;
    this.#capacity = capacity;
  }
}
