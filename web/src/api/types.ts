// Takes the generated schema; gives short names for what the page uses of it.
import type { components } from "./schema";

type Schemas = components["schemas"];

export type ProbeInfo = Schemas["ProbeInfo"];
export type ProbeList = Schemas["ProbeList"];
export type Histogram = Schemas["Histogram"];
export type Health = Schemas["Health"];
export type EngineDescription = Schemas["EngineDescription"];
export type Example = Schemas["Example"];
export type Message = Schemas["Message"];
export type ClairaiFields = Schemas["ClairaiFields"];
export type TokenEvent = Schemas["TokenEvent"];
export type ProbeUpdateEvent = Schemas["ProbeUpdateEvent"];
export type ProbeFinalEvent = Schemas["ProbeFinalEvent"];
/** Runs that were kept before there were rules and captures know of neither. */
export type DoneEvent = Omit<Schemas["DoneEvent"], "stop_reasons" | "capture"> &
  Partial<Pick<Schemas["DoneEvent"], "stop_reasons" | "capture">>;
export type ErrorDetail = Schemas["ErrorDetail"];
export type Part = TokenEvent["part"];

/** What OpenAI's GET /v1/models answers, as far as the page reads it. */
export interface ModelList {
  data: { id: string }[];
}
