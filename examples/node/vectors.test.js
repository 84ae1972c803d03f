// node --test: what this client's message-pack reads is what the vectors mean.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { decode, encode } from "@msgpack/msgpack";

const directory = process.env.REFITD_VECTORS ?? new URL("../../protocol/vectors/", import.meta.url).pathname;

for (const file of ["requests", "replies"]) {
  for (const { name, frames, meaning } of JSON.parse(readFileSync(`${directory}/${file}.json`))) {
    test(`${file}: ${name}`, () => {
      const [magic, header] = frames.map((frame) => Buffer.from(frame, "hex"));
      assert.equal(magic.toString(), "RFT1");
      assert.deepEqual(readable(decode(header)), meaning);
      assert.deepEqual(readable(decode(encode(decode(header)))), meaning);
    });
  }
}

function readable(value) {
  if (value instanceof Uint8Array) return { hex: Buffer.from(value).toString("hex") };
  if (Array.isArray(value)) return value.map(readable);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, readable(item)]));
}
