// Polls the server for its health, models, probes, steering and examples.
import { ApiError, type Server } from "../api/http";
import type { EngineDescription, Example, Health, ModelList, ProbeInfo, ProbeList } from "../api/types";
import { MAX_LINES } from "../colour/lines";
import { TIERS, type Tiers, type VectorList } from "../api/steering";
import type { Store } from "./store";
import type { Steering } from "./types";

export const SOON_MS = 1500;
export const LATER_MS = 8000;

/** The statuses of an engine without steering, or without clairai. */
const NO_STEERING: ReadonlySet<number> = new Set([404, 405, 409, 501]);

export class ServerMonitor {
  #timer: ReturnType<typeof setTimeout> | undefined;
  #isBusy = false;

  constructor(
    private readonly server: Server,
    private readonly store: Store,
    private readonly forgetKey: () => void,
  ) {}

  /** Poll now, and again regularly while the page is open. */
  async poll(): Promise<void> {
    if (this.#isBusy) return;
    this.#isBusy = true;
    clearTimeout(this.#timer);
    const isGood = await this.#pollOnce();
    this.#isBusy = false;
    this.#timer = setTimeout(() => void this.poll(), isGood ? LATER_MS : SOON_MS);
  }

  stop(): void {
    clearTimeout(this.#timer);
  }

  /** True if the engine is serving and all its data were read. */
  async #pollOnce(): Promise<boolean> {
    try {
      const answer = await this.server.ask("health");
      const health = (await answer.json()) as Health;
      this.store.setState({ connection: { kind: "answered", health } });
      if (!answer.ok) return false;
      await this.#readEngine();
      return true;
    } catch (error) {
      this.#fail(error);
      return false;
    }
  }

  async #readEngine(): Promise<void> {
    const [models, probes, engine, examples, steering] = await Promise.all([
      this.server.json<ModelList>("v1/models"),
      this.#getIfPresent<ProbeList>("v1/probes"),
      this.#getIfPresent<EngineDescription>("v1/clairai"),
      this.#getIfPresent<{ data: Example[] }>("v1/examples"),
      this.#steering(),
    ]);
    const ids = models.data.map(({ id }) => id);
    this.store.setState((state) => ({
      key: { isNeeded: false, wasRefused: false },
      models: keepIfEqual(state.models, ids),
      model: state.model !== null && ids.includes(state.model) ? state.model : (ids[0] ?? null),
      engine,
      steering: JSON.stringify(state.steering) === JSON.stringify(steering) ? state.steering : steering,
      examples: keepIfEqual(state.examples, examples?.data ?? []),
      ...keepChoices(keepIfEqual(state.probes, probes?.data ?? []), state.probe, state.lines),
    }));
  }

  /** null if the engine has no such route: the page also works with a vLLM without clairai. */
  async #getIfPresent<T>(path: string): Promise<T | null> {
    try {
      return await this.server.json<T>(path);
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) return null;
      throw error;
    }
  }

  /** Read the steering again at once, after it was changed. */
  async refreshSteering(): Promise<void> {
    const steering = await this.#steering();
    this.store.setState({ steering });
  }

  async #steering(): Promise<Steering> {
    try {
      const [list, tiers] = await Promise.all([
        this.server.json<VectorList>("v1/steering/vectors"),
        this.server.json<Partial<Tiers>>("v1/steering"),
      ]);
      const { data: vectors, points } = list;
      const all = Object.fromEntries(TIERS.map((tier) => [tier, tiers[tier] ?? []])) as Tiers;
      return { kind: "on", vectors, points, tiers: all };
    } catch (error) {
      if (error instanceof ApiError && NO_STEERING.has(error.status)) {
        return { kind: "off", reason: error.status === 404 ? null : error.message };
      }
      throw error;
    }
  }

  #fail(error: unknown): void {
    if (error instanceof ApiError && error.status === 401) {
      const { key } = this.store.getState();
      this.store.setState({ key: { isNeeded: true, wasRefused: key.wasRefused } });
      this.forgetKey();
      return;
    }
    if (error instanceof ApiError) {
      this.store.setState({ notice: error.message });
      return;
    }
    // No response, or not one of this server.
    this.store.setState(({ connection }) => ({
      connection: {
        kind: "unreachable",
        attempts: connection.kind === "unreachable" ? connection.attempts + 1 : 1,
      },
    }));
  }
}

/** The old list if the new one is equal, so that nothing renders again. */
export function keepIfEqual<T>(old: T[] | null, found: T[]): T[] {
  return old !== null && JSON.stringify(old) === JSON.stringify(found) ? old : found;
}

/** Keep the chosen probe and lines while they exist; by default, choose the first probes. */
export function keepChoices(
  probes: ProbeInfo[],
  probe: string | null,
  lines: string[],
): { probes: ProbeInfo[]; probe: string | null; lines: string[] } {
  const names = new Set(probes.map(({ name }) => name));
  const kept = lines.filter((name) => names.has(name));
  return {
    probes,
    probe: probe !== null && names.has(probe) ? probe : (probes[0]?.name ?? null),
    lines: keepIfEqual(lines, kept.length > 0 ? kept : [...names].slice(0, MAX_LINES)),
  };
}
