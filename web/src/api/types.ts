// Short names for the types of the generated schema that the page uses.
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
export type PromptMedia = Schemas["PromptMedia"];
/** Only an engine that accepts new weights reports which ones were used; most prompts are text alone. */
export type ProbeUpdateEvent = Omit<Schemas["ProbeUpdateEvent"], "weights" | "media"> &
  Partial<Pick<Schemas["ProbeUpdateEvent"], "weights" | "media">>;
export type ProbeFinalEvent = Schemas["ProbeFinalEvent"];
/** Runs saved before stop rules, captures and weight transfers existed lack these fields. */
export type DoneEvent = Omit<Schemas["DoneEvent"], "stop_reasons" | "capture" | "weights"> &
  Partial<Pick<Schemas["DoneEvent"], "stop_reasons" | "capture" | "weights">>;
export type ErrorDetail = Schemas["ErrorDetail"];
export type Part = TokenEvent["part"];

/** The fields of OpenAI's GET /v1/models that the page reads. */
export interface ModelList {
  data: { id: string }[];
}
