// Changes to the steering entries and stop rules of the draft.
import type { VectorInfo } from "../api/steering";
import type { RuleDraft } from "../data/rules";
import { freshEntry, MAX_ENTRIES, nextId, type EntryDraft } from "../data/entryDraft";
import type { Store } from "./store";
import type { Draft } from "./types";

function change(store: Store, make: (draft: Draft) => Partial<Draft>): void {
  store.setState(({ draft }) => ({ draft: { ...draft, ...make(draft) } }));
}

export function addEntry(store: Store, vector: VectorInfo): void {
  change(store, ({ entries }) =>
    entries.length >= MAX_ENTRIES ? {} : { entries: [...entries, freshEntry(nextId(entries), vector)] },
  );
}

export function changeEntry(store: Store, id: number, made: Partial<EntryDraft>): void {
  change(store, ({ entries }) => ({
    entries: entries.map((entry) => (entry.id === id ? { ...entry, ...made } : entry)),
  }));
}

export function removeEntries(store: Store, isGone: (entry: EntryDraft) => boolean): void {
  change(store, ({ entries }) => ({ entries: entries.filter((entry) => !isGone(entry)) }));
}

export function addRule(store: Store, probe: string): void {
  change(store, ({ rules }) => ({
    rules: [...rules, { id: nextId(rules), probe, threshold: null, tokens: 3, action: "stop" }],
  }));
}

export function changeRule(store: Store, id: number, made: Partial<RuleDraft>): void {
  change(store, ({ rules }) => ({
    rules: rules.map((rule) => (rule.id === id ? { ...rule, ...made } : rule)),
  }));
}

export function removeRule(store: Store, id: number): void {
  change(store, ({ rules }) => ({ rules: rules.filter((rule) => rule.id !== id) }));
}

export function setPaired(store: Store, isPaired: boolean): void {
  change(store, () => ({ isPaired }));
}
