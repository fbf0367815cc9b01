// Takes package-lock.json as npm wrote it; takes the addresses of this machine's registry out of it.
// Packages are found by name and version, and known by their integrity, whatever registry serves them.
// npm's own omit-lockfile-registry-resolved also loses other platforms' packages, and npm ci then refuses.
import { readFileSync, writeFileSync } from "node:fs";

const FILE = new URL("../package-lock.json", import.meta.url);
const lock = JSON.parse(readFileSync(FILE, "utf8"));
for (const entry of Object.values(lock.packages)) delete entry.resolved;
writeFileSync(FILE, `${JSON.stringify(lock, null, 2)}\n`);
