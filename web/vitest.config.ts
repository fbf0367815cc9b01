// Takes tests of the page's logic; runs them in Node: what needs a browser is a journey.
import { defineConfig } from "vitest/config";

export default defineConfig({ test: { include: ["tests/**/*.test.{ts,tsx}"], environment: "node" } });
