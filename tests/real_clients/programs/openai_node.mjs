// Two agents with the `openai` package of npm; the second one through its streaming helper.
import { randomUUID } from "node:crypto";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.RELAYKV_URL}/v1`, apiKey: "none" });
const shared = {
  model: "SmolLM2-135M-Instruct",
  max_tokens: 70,
  temperature: 0,
  relay_session: `node-${randomUUID()}`,
};

const draft = await client.chat.completions.create({
  ...shared,
  messages: [
    { role: "system", content: "You write short product texts." },
    { role: "user", content: "Write about a folding desk lamp." },
  ],
});
const stream = client.chat.completions.stream({
  ...shared,
  stream_options: { include_usage: true },
  messages: [
    { role: "system", content: "You review product texts for a shop, and you are strict." },
    { role: "user", content: "Write about a folding desk lamp." },
    draft.choices[0].message, // everything that the server sent goes back to it
    { role: "user", content: "Say what you would change." },
  ],
});
console.log(await stream.finalContent());
