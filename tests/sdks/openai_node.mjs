// OpenAI's Node client: each step of the common script. Run: node openai_node.mjs JSON, where `openai` can be found (see sdk_matrix.py).
import assert from "node:assert";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const told = JSON.parse(process.argv[2]);
const found = createRequire(pathToFileURL(process.cwd() + "/")).resolve("openai");
const { default: OpenAI } = await import(pathToFileURL(found));
const client = new OpenAI({ baseURL: told.url, apiKey: told.key });
const messages = [{ role: "user", content: "Hello, how are you?" }];
const ask = (more) => client.chat.completions.create({ model: told.chat, messages, max_tokens: 8, ...more });

const steps = {
  async retries() {
    assert((await ask({})).choices[0].message.content);
  },
  async chat() {
    const answer = await ask({ temperature: 0.5 });
    assert(answer.choices[0].message.content);
    assert.equal(answer.usage.completion_tokens, 8);
  },
  async stream() {
    let text = "", reason = null;
    for await (const chunk of await ask({ stream: true })) {
      text += chunk.choices[0].delta.content ?? "";
      reason = chunk.choices[0].finish_reason ?? reason;
    }
    assert(text);
    assert.equal(reason, "length");
  },
  async tools() {
    const answer = await ask({ tools: told.tools, tool_choice: told.tool_choice, max_tokens: 60 });
    const call = answer.choices[0].message.tool_calls[0];
    assert.equal(call.function.name, "weather");
    assert("city" in JSON.parse(call.function.arguments));
  },
  async errors() {
    await assert.rejects(ask({ model: "missing" }), (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model: told.vectors, input: ["a", "b"] });
    assert(answer.data[1].embedding.length > 4);
  },
};

for (const [name, step] of Object.entries(steps)) {
  if (told.skip.includes(name)) continue;
  try {
    await step();
    console.log(JSON.stringify([name, ""]));
  } catch (error) {
    console.log(JSON.stringify([name, String(error).slice(0, 300)]));
  }
}
