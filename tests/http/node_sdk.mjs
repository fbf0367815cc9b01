// Takes the proxy's address; gives what the official `openai` package for Node makes of it, as JSON.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "k", maxRetries: 0 });
const asked = { model: "toy", messages: [{ role: "user", content: "Hi" }] };
const scored = { ...asked, clairai: { probes: "all", prompt_scores: true } };

async function gathered(stream) {
  const found = { texts: {}, scores: {} };
  for await (const chunk of stream) {
    for (const choice of chunk.choices) {
      const said = choice.delta ? choice.delta.content : choice.text;
      found.texts[choice.index] = (found.texts[choice.index] ?? "") + (said ?? "");
      const scores = choice.probe_scores?.scores ?? [];
      if (scores.length) (found.scores[choice.index] ??= []).push(...scores);
    }
  }
  return found;
}

const whole = await client.chat.completions.create(asked);
const wholeScored = await client.chat.completions.create(scored);
let error = [];
try {
  await client.chat.completions.create({ ...asked, clairai: { bogus: 1 } });
} catch (caught) {
  error = [caught.status, caught.code, caught.param];
}
const models = [];
for await (const model of client.models.list()) models.push(model.id);
console.log(
  JSON.stringify({
    models,
    error,
    whole: whole.choices[0].message.content,
    scored: wholeScored.choices[0].message.content,
    scored_extra: ["probe_scores", "prompt_scores"].filter((name) => name in wholeScored.choices[0]),
    stream: await gathered(await client.chat.completions.create({ ...asked, stream: true })),
    stream_scored: await gathered(
      await client.chat.completions.create({ ...scored, n: 2, stream: true }),
    ),
    completion: await gathered(
      await client.completions.create({ ...scored, messages: undefined, prompt: "Hi", stream: true }),
    ),
  }),
);
