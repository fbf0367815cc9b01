// Unit tests of the page run in Node; what needs a browser is a journey.
import { defineConfig } from "vitest/config";

export default defineConfig({ test: { include: ["tests/**/*.test.{ts,tsx}"], environment: "node" } });
