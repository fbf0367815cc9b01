// Journeys run in a real browser against the servers that the environment variables name.
import { defineConfig } from "vitest/config";

export default defineConfig({
  test: {
    include: ["journeys/**/*.test.ts"],
    environment: "node",
    globalSetup: "journeys/browser.ts",
    fileParallelism: false,
    // Reached only by what never comes: a busy machine takes ten times as long as a quiet one.
    testTimeout: 900_000,
    hookTimeout: 300_000,
    expect: { poll: { timeout: 120_000 } },
  },
});
