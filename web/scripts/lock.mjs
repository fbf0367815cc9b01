// Removes the registry's addresses from package-lock.json after npm has written it.
// Packages are found by name and version and verified by their integrity, whichever registry serves them.
// npm's own omit-lockfile-registry-resolved also drops the packages of other platforms, so `npm ci` fails.
import { readFileSync, writeFileSync } from "node:fs";

const FILE = new URL("../package-lock.json", import.meta.url);
const lock = JSON.parse(readFileSync(FILE, "utf8"));
for (const entry of Object.values(lock.packages)) delete entry.resolved;
writeFileSync(FILE, `${JSON.stringify(lock, null, 2)}\n`);
