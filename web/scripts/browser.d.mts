import type { LaunchOptions } from "playwright-core";

export function launchOptions(flags?: readonly string[]): Promise<LaunchOptions>;
