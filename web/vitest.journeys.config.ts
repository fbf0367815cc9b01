// Journeys run in a real browser against the servers that the environment variables name.
import { defineConfig } from "vitest/config";

export default defineConfig({
  test: {
    include: ["journeys/**/*.test.ts"],
    environment: "node",
    globalSetup: "journeys/browser.ts",
    fileParallelism: false,
    testTimeout: 180_000,
    hookTimeout: 90_000,
    expect: { poll: { timeout: 20_000 } },
  },
});
