// A refitd client in JavaScript: frames, sessions, unary calls, refits, streamed generation. See docs/protocol.md.

import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const MAGIC = Buffer.from("RFT1");
const DELIMITER = Buffer.alloc(0);

/** A `Failed` reply: `code`, `fault`, `retryable` and `details` are the daemon's. */
export class RefitdError extends Error {
  constructor({ code, fault, message, retryable, details = {} }) {
    super(`${code}: ${message}`);
    Object.assign(this, { code, fault, retryable, details });
  }
}

/** One session. `await Client.connect(endpoint)`, and `await client.close()` at the end. */
export class Client {
  #socket;
  #session;
  #lastId = 0;
  #waiting = new Map(); // id -> { resolve, reject }, for requests with one reply
  #streams = new Map(); // id -> Stream
  #heartbeat;

  static async connect(endpoint, name = "node") {
    const client = new Client(endpoint);
    await client.#open(name);
    return client;
  }

  constructor(endpoint) {
    this.#socket = new Dealer({ linger: 0 });
    this.#socket.connect(endpoint);
    this.#read();
  }

  /** Asks and returns the fact that answers; throws `RefitdError`. */
  async ask(body, { session = this.#session, id = this.#nextId() } = {}) {
    const answer = new Promise((resolve, reject) => this.#waiting.set(id, { resolve, reject }));
    await this.#send(id, session, body);
    return answer;
  }

  status() {
    return this.ask({ type: "GetStatus" });
  }

  /**
   * Commits a refit of a source that a trainer opened in its own session, from which `session`, `epoch` and `source` are.
   * Ids of that session go on where the trainer left off: a refusal says where that is.
   */
  async commitRefit({ session, epoch, source, ...options }) {
    const body = { type: "CommitRefit", epoch, source, ...options };
    try {
      return (await this.ask(body, { session })).report;
    } catch (error) {
      if (error.code !== "duplicate_request") throw error;
      this.#lastId = Math.max(this.#lastId, error.details.last);
      return (await this.ask(body, { session })).report;
    }
  }

  /** Yields `{ prompt, output, tokenIds, logprobs, versions, finishReason }` as the engine makes tokens. */
  async *stream(prompts, sampling = {}) {
    const id = this.#nextId();
    const stream = new Stream();
    this.#streams.set(id, stream);
    const body = { type: "Generate", prompt_lengths: prompts.map((ids) => ids.length), sampling };
    await this.#send(id, this.#session, body, [int32(prompts.flat())]);
    let finished = false;
    try {
      yield* stream.deltas();
      finished = true;
    } finally {
      this.#streams.delete(id);
      if (finished) await this.ask({ type: "AcknowledgeGeneration", requests: [id] });
      else await this.ask({ type: "CancelGeneration", request: id });
    }
  }

  async close() {
    clearInterval(this.#heartbeat);
    await this.ask({ type: "Goodbye" });
    this.#socket.close();
  }

  async #open(name) {
    const hello = { type: "Hello", protocol_versions: [1], client: name, pid: process.pid };
    const welcome = await this.ask(hello, { session: undefined });
    this.#session = welcome.session;
    this.#heartbeat = setInterval(() => this.ask({ type: "Heartbeat" }), welcome.heartbeat_seconds * 1000);
    this.#heartbeat.unref();
  }

  #nextId() {
    return ++this.#lastId;
  }

  async #send(id, session, body, blobs = []) {
    const header = session === undefined ? { id, body } : { id, session, body };
    await this.#socket.send([DELIMITER, MAGIC, encode(header), ...blobs]);
  }

  async #read() {
    for await (const [, , header, ...blobs] of this.#socket) {
      const { id, body } = decode(header);
      if (body.type === "TokensGenerated") this.#deliver(body.deltas, blobs);
      else if (this.#waiting.has(id)) this.#settle(id, body);
      else this.#advance(id, body, blobs);
    }
  }

  #settle(id, body) {
    const { resolve, reject } = this.#waiting.get(id);
    this.#waiting.delete(id);
    if (body.type === "Failed") reject(new RefitdError(body));
    else resolve(body);
  }

  #advance(id, body, blobs) {
    const stream = this.#streams.get(id);
    if (body.type === "Failed") stream?.end(new RefitdError(body));
    if (body.type !== "GenerationFinished") return;
    this.#deliver(body.deltas, blobs);
    stream?.end();
  }

  #deliver(deltas, blobs) {
    let at = 0;
    for (const delta of deltas) {
      const next = at + delta.count;
      this.#streams.get(delta.request)?.put({
        prompt: delta.prompt,
        output: delta.output,
        position: delta.position,
        tokenIds: numbers(blobs[0], at, next, "readInt32LE"),
        logprobs: numbers(blobs[1], at, next, "readFloatLE"),
        versions: delta.versions,
        finishReason: delta.finish_reason ?? null,
      });
      at = next;
    }
  }
}

/** What arrives for one generation, until it is taken. */
class Stream {
  #arrived = [];
  #ended = false;
  #error;
  #wake = () => {};

  put(delta) {
    this.#arrived.push(delta);
    this.#wake();
  }

  end(error) {
    this.#ended = true;
    this.#error = error;
    this.#wake();
  }

  async *deltas() {
    for (;;) {
      while (this.#arrived.length) yield this.#arrived.shift();
      if (this.#error) throw this.#error;
      if (this.#ended) return;
      await new Promise((resolve) => (this.#wake = resolve));
    }
  }
}

function int32(ids) {
  const blob = Buffer.alloc(4 * ids.length);
  ids.forEach((id, index) => blob.writeInt32LE(id, 4 * index));
  return blob;
}

function numbers(blob, from, to, read) {
  return Array.from({ length: to - from }, (_, index) => blob[read](4 * (from + index)));
}
