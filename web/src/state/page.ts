// Creates the parts of the page and connects them.
import { createContext, useContext } from "react";
import { createServer, type Server } from "../api/http";
import type { Saved } from "../export/html";
import { fromFile, runOf } from "../data/runFile";
import { addressOf, parseAddress, type Address } from "./address";
import { CrossingLog } from "./crossingLog";
import { FrameQueue } from "./frameQueue";
import { Chat } from "./chat";
import { createFocus, shownFocus, type FocusStore } from "./focus";
import { MAX_KEPT, type History } from "./history";
import { safeStorage } from "./safeStorage";
import { TokenViews } from "./tokenViews";
import { TranscriptStore } from "./transcriptStore";
import { createPageStore, pathTo, type Store } from "./store";
import { RUNNING, type ThemeChoice } from "./types";
import { keepChoices, ServerMonitor } from "./serverMonitor";

export interface Page {
  server: Server;
  store: Store;
  transcripts: TranscriptStore;
  focus: FocusStore;
  frames: FrameQueue;
  tokenViews: TokenViews;
  chat: Chat;
  monitor: ServerMonitor;
  crossingLog: CrossingLog;
  history: History;
  giveKey(key: string): void;
  hasKey(): boolean;
}

const local = safeStorage(() => localStorage);
const session = safeStorage(() => sessionStorage);
const KEY = "clairai.key";
const HIDDEN_MS = 1000;
const THEME = "clairai.theme";
const SHORTCUTS = "clairai.shortcuts";

export const PageContext = createContext<Page | null>(null);

export function usePage(): Page {
  const page = useContext(PageContext);
  if (!page) throw new Error("this part was rendered outside the page");
  return page;
}

export function createPage(history: History, base: string): Page {
  const frames = new FrameQueue(nextFrame);
  const transcripts = new TranscriptStore(frames);
  const store = createPageStore({ theme: storedTheme(), hasShortcuts: local.read(SHORTCUTS) !== "off" });
  const server = createServer(base, () => session.read(KEY));
  const monitor = new ServerMonitor(server, store, () => session.write(KEY, null));
  const newId = () => crypto.getRandomValues(new BigUint64Array(1))[0]?.toString(36) ?? "0";
  const page: Page = {
    server,
    store,
    transcripts,
    focus: createFocus(),
    frames,
    tokenViews: new TokenViews(),
    chat: new Chat(server, store, transcripts, history, newId, () => Date.now()),
    monitor,
    crossingLog: new CrossingLog(store, transcripts),
    history,
    giveKey(key) {
      session.write(KEY, key);
      store.setState({ key: { isNeeded: false, wasRefused: true } });
      void monitor.poll();
    },
    hasKey: () => session.read(KEY) !== null,
  };
  store.subscribe((state, before) => {
    if (state.theme !== before.theme) local.write(THEME, state.theme);
    if (state.hasShortcuts !== before.hasShortcuts) {
      local.write(SHORTCUTS, state.hasShortcuts ? "on" : "off");
    }
    if (state.head !== before.head || state.versus !== before.versus) openShown(page);
  });
  return page;
}

/** A hidden page gets no animation frames, but its title must still count crossings. */
function nextFrame(callback: () => void): void {
  let frame = 0;
  const timer = setTimeout(() => {
    cancelAnimationFrame(frame);
    callback();
  }, HIDDEN_MS);
  frame = requestAnimationFrame(() => {
    clearTimeout(timer);
    callback();
  });
}

function storedTheme(): ThemeChoice {
  const stored = local.read(THEME);
  return stored === "light" || stored === "dark" ? stored : "system";
}

/** Load the scores of the shown runs and log their crossings. */
function openShown(page: Page): void {
  const { runs, head, versus } = page.store.getState();
  for (const id of [head, versus]) {
    if (id === null) continue;
    for (const run of pathTo(runs, id)) page.crossingLog.watch(run.id);
    void page.chat.open(id);
  }
}

/** Start a live page: read the history and the address, then keep both up to date. */
export async function goLive(page: Page): Promise<void> {
  const address = parseAddress(location.hash);
  apply(page, address);
  await loadHistory(page, address);
  const write = () => writeAddress(page);
  page.store.subscribe(() => page.frames.schedule(write));
  page.focus.subscribe((state, before) => {
    if (state.pin !== before.pin) page.frames.schedule(write);
  });
  for (const change of ["online", "offline"]) window.addEventListener(change, () => void page.monitor.poll());
  window.addEventListener("hashchange", () => {
    const next = parseAddress(location.hash);
    apply(page, next);
    choose(page, next);
  });
  await page.monitor.poll();
}

function apply(page: Page, address: Address): void {
  const { hasMarkdown, hasMarks, hasMono } = address;
  page.store.setState((state) => ({
    hasMarkdown,
    hasMarks,
    hasMono,
    probe: address.probe ?? state.probe,
    lines: address.lines ?? state.lines,
    pane: address.pane ?? "chat",
  }));
}

async function loadHistory(page: Page, address: Address): Promise<void> {
  const entries = await page.history.list();
  const kept = entries.slice(-MAX_KEPT);
  const runs = kept.map(({ run, probes }) => runOf(run, probes));
  page.store.setState({ runs: Object.fromEntries(runs.map((run) => [run.id, run])) });
  await page.history.remove(entries.slice(0, -MAX_KEPT).map(({ id }) => id));
  for (const run of runs.filter(({ status }) => RUNNING.has(status))) void page.chat.resume(run);
  choose(page, address);
}

/** Show the run that the address names; if this browser lacks it, fill in its question. */
function choose(page: Page, address: Address): void {
  const { runs, draft } = page.store.getState();
  const head = address.run !== null && address.run in runs ? address.run : null;
  const versus = address.versus !== null && address.versus in runs ? address.versus : null;
  page.store.setState({ head, versus });
  if (head !== null && address.at) {
    page.focus.setState({ pin: { run: head, token: address.at }, hover: null, anchor: null });
  }
  if (head === null && address.question) {
    page.store.setState({
      draft: { ...draft, ...address.question },
      notice:
        address.run === null
          ? null
          : "This link's run is kept in another browser. Its question is ready to be asked again.",
    });
  }
}

function writeAddress(page: Page): void {
  const { pin } = page.focus.getState();
  const state = page.store.getState();
  const at = pin !== null && pin.run === state.head ? pin.token : null;
  const hash = addressOf(state, at, null);
  if (hash !== location.hash)
    history.replaceState(null, "", hash === "" ? location.pathname + location.search : hash);
}

/** Show the runs of an exported file, which needs no server. */
export function freeze(page: Page, saved: Saved): void {
  const loaded = saved.runs.map((file) => fromFile(file));
  for (const { run, transcript } of loaded) page.transcripts.put(run.id, transcript);
  const [first, second] = loaded.map(({ run }) => run);
  const probes = first?.probes ?? [];
  page.store.setState({
    isFrozen: true,
    runs: Object.fromEntries(loaded.map(({ run }) => [run.id, { ...run, parent: null }])),
    ...keepChoices(probes, saved.probe, saved.lines),
    head: first?.id ?? null,
    versus: second?.id ?? null,
    model: first?.model ?? null,
  });
}

export function focusedRun(page: Page): string | null {
  return shownFocus(page.focus.getState())?.run ?? page.store.getState().head;
}
