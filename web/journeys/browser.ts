// Vitest's global setup: starts one browser for all journeys and closes it after the last.
import { chromium } from "playwright-core";
import type { TestProject } from "vitest/node";
import { launchOptions } from "../scripts/browser.mjs";

declare module "vitest" {
  interface ProvidedContext {
    browser: string;
  }
}

export default async function setup(project: TestProject): Promise<() => Promise<void>> {
  const server = await chromium.launchServer({ ...(await launchOptions()), host: "127.0.0.1" });
  project.provide("browser", server.wsEndpoint());
  return () => server.close();
}
