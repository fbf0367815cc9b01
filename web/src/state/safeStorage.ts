// Reads and writes browser storage; where storage is forbidden, values are not kept.

export interface SafeStorage {
  read(name: string): string | null;
  write(name: string, value: string | null): void;
}

/** Storage throws if cookies are blocked, and in some files opened from disk. */
export function safeStorage(storage: () => Storage): SafeStorage {
  return {
    read(name) {
      try {
        return storage().getItem(name);
      } catch {
        return null;
      }
    },
    write(name, value) {
      try {
        if (value === null) storage().removeItem(name);
        else storage().setItem(name, value);
      } catch {
        // The value is lost at the next visit; nothing else depends on it.
      }
    },
  };
}
