// Takes the browser; gives the page's parts, wired together. The only place that knows all of them.
import { createContext, useContext } from "react";
import { createServer, type Server } from "../api/http";
import type { Saved } from "../export/html";
import { fromFile, runOf } from "../data/runfile";
import { addressOf, parseAddress, type Address } from "./address";
import { Alarm } from "./alarm";
import { Beat } from "./beat";
import { Chat } from "./chat";
import { createFocus, shownFocus, type FocusStore } from "./focus";
import { MAX_KEPT, type History } from "./history";
import { remembering } from "./memory";
import { Places } from "./places";
import { Shelf } from "./shelf";
import { createPageStore, pathTo, type Store } from "./store";
import { RUNNING, type ThemeChoice } from "./types";
import { chosen, Watch } from "./watch";

export interface Page {
  server: Server;
  store: Store;
  shelf: Shelf;
  focus: FocusStore;
  beat: Beat;
  places: Places;
  chat: Chat;
  watch: Watch;
  alarm: Alarm;
  history: History;
  giveKey(key: string): void;
  hasKey(): boolean;
}

const local = remembering(() => localStorage);
const session = remembering(() => sessionStorage);
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
  const beat = new Beat(nextFrame);
  const shelf = new Shelf(beat);
  const store = createPageStore({ theme: storedTheme(), hasShortcuts: local.read(SHORTCUTS) !== "off" });
  const server = createServer(base, () => session.read(KEY));
  const watch = new Watch(server, store, () => session.write(KEY, null));
  const newId = () => crypto.getRandomValues(new BigUint64Array(1))[0]?.toString(36) ?? "0";
  const page: Page = {
    server,
    store,
    shelf,
    focus: createFocus(),
    beat,
    places: new Places(),
    chat: new Chat(server, store, shelf, history, newId, () => Date.now()),
    watch,
    alarm: new Alarm(store, shelf),
    history,
    giveKey(key) {
      session.write(KEY, key);
      store.setState({ key: { isNeeded: false, wasRefused: true } });
      void watch.look();
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

/** A hidden page gets no frames, but crossings must still be counted in its title. */
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

/** Whatever is shown has its scores loaded and its crossings watched. */
function openShown(page: Page): void {
  const { runs, head, versus } = page.store.getState();
  for (const id of [head, versus]) {
    if (id === null) continue;
    for (const run of pathTo(runs, id)) page.alarm.watch(run.id);
    void page.chat.open(id);
  }
}

/** A live page: read the history and the address, then keep both up to date. */
export async function goLive(page: Page): Promise<void> {
  const address = parseAddress(location.hash);
  apply(page, address);
  await recall(page, address);
  const write = () => writeAddress(page);
  page.store.subscribe(() => page.beat.ask(write));
  page.focus.subscribe((state, before) => {
    if (state.pin !== before.pin) page.beat.ask(write);
  });
  for (const change of ["online", "offline"]) window.addEventListener(change, () => void page.watch.look());
  window.addEventListener("hashchange", () => {
    const next = parseAddress(location.hash);
    apply(page, next);
    choose(page, next);
  });
  await page.watch.look();
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

async function recall(page: Page, address: Address): Promise<void> {
  const entries = await page.history.list();
  const kept = entries.slice(-MAX_KEPT);
  const runs = kept.map(({ run, probes }) => runOf(run, probes));
  page.store.setState({ runs: Object.fromEntries(runs.map((run) => [run.id, run])) });
  await page.history.remove(entries.slice(0, -MAX_KEPT).map(({ id }) => id));
  for (const run of runs.filter(({ status }) => RUNNING.has(status))) void page.chat.takeUp(run);
  choose(page, address);
}

/** Show the run that the address names; where this browser lacks it, offer its question. */
function choose(page: Page, address: Address): void {
  const { runs, draft } = page.store.getState();
  const head = address.run !== null && address.run in runs ? address.run : null;
  const versus = address.versus !== null && address.versus in runs ? address.versus : null;
  page.store.setState({ head, versus });
  if (head !== null && address.at) {
    page.focus.setState({ pin: { run: head, spot: address.at }, hover: null, anchor: null });
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
  const at = pin !== null && pin.run === state.head ? pin.spot : null;
  const hash = addressOf(state, at, null);
  if (hash !== location.hash)
    history.replaceState(null, "", hash === "" ? location.pathname + location.search : hash);
}

/** An exported file: the runs are in it, nothing is asked of any server. */
export function freeze(page: Page, saved: Saved): void {
  const loaded = saved.runs.map((file) => fromFile(file));
  for (const { run, tape } of loaded) page.shelf.put(run.id, tape);
  const [first, second] = loaded.map(({ run }) => run);
  const probes = first?.probes ?? [];
  page.store.setState({
    isFrozen: true,
    runs: Object.fromEntries(loaded.map(({ run }) => [run.id, { ...run, parent: null }])),
    ...chosen(probes, saved.probe, saved.lines),
    head: first?.id ?? null,
    versus: second?.id ?? null,
    model: first?.model ?? null,
  });
}

export function focusedRun(page: Page): string | null {
  return shownFocus(page.focus.getState())?.run ?? page.store.getState().head;
}
