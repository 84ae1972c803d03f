// node main.js ENDPOINT status
// node main.js ENDPOINT generate "5,60,7" MAX_TOKENS     greedy; a JSON line for each delta
// node main.js ENDPOINT refit SESSION EPOCH SOURCE       of a source that a trainer has opened

import { Client, RefitdError } from "./refitd.js";

const commands = {
  async status(client) {
    print(await client.status());
  },
  async generate(client, ids, maxTokens) {
    const sampling = { temperature: 0, max_tokens: Number(maxTokens), ignore_eos: true };
    for await (const delta of client.stream([ids.split(",").map(Number)], sampling)) print(delta);
  },
  async refit(client, session, epoch, source) {
    print(await client.commitRefit({ session, epoch: Number(epoch), source: Number(source) }));
  },
};

function print(value) {
  console.log(JSON.stringify(value));
}

const [endpoint, name, ...options] = process.argv.slice(2);
if (!commands[name]) {
  console.error(`usage: node main.js ENDPOINT {${Object.keys(commands).join("|")}} ...`);
  process.exit(2);
}
const client = await Client.connect(endpoint);
try {
  await commands[name](client, ...options);
} catch (error) {
  if (!(error instanceof RefitdError)) throw error;
  console.error(error.message);
  process.exitCode = 1;
} finally {
  await client.close();
}
