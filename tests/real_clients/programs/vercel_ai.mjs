// Two agents with the Vercel AI SDK; the session stands in the base URL, both are streamed.
import { randomUUID } from "node:crypto";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";

const relaykv = createOpenAICompatible({
  name: "relaykv",
  baseURL: `${process.env.RELAYKV_URL}/s/vercel-${randomUUID()}/v1`,
  includeUsage: true,
});
const model = relaykv("SmolLM2-135M-Instruct");

async function ask(system, prompt) {
  const result = streamText({
    model,
    system,
    prompt,
    maxOutputTokens: 70,
    temperature: 0,
    onError({ error }) {
      throw error;
    },
  });
  return await result.text;
}

const draft = await ask("You write short product texts.", "Write about a folding desk lamp.");
const task = `A colleague wrote:\n\n${draft}\n\nSay what you would change.`;
console.log(await ask("You review product texts for a shop, and you are strict.", task));
