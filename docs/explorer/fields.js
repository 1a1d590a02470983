// SPDX-License-Identifier: Apache-2.0
// What one may type into the explorer: the fields, their rules, and how they travel in the address.
"use strict";

globalThis.cpattnFields = (() => {
  const MAX_TOKENS = 2 ** 25; // so that all counts stay exact in a number of JavaScript
  const MAX_SEQUENCES = 64;
  const { STRATEGIES, ITEM_BYTES } = globalThis.cpattnPlan;

  const shown = (number) => number.toLocaleString("en-US");
  const quoted = (text) => `“${text.length > 24 ? `${text.slice(0, 24)}…` : text}”`;

  class FieldError extends Error {
    constructor(field, rule) {
      super(`${FIELDS[field].name}: ${rule}`);
      this.field = field;
    }
  }

  function wholeNumber(field, text, least, most, subject = "must be") {
    const value = /^\d{1,15}$/.test(text.trim()) ? Number(text) : NaN;
    if (!(value >= least && value <= most)) {
      const range = `a whole number from ${shown(least)} to ${shown(most)}`;
      throw new FieldError(field, `${subject} ${range}, got ${quoted(text.trim())}.`);
    }
    return value;
  }

  function lengths(field, text) {
    const parts = text.split(",");
    if (parts.length > MAX_SEQUENCES) {
      throw new FieldError(field, `at most ${MAX_SEQUENCES} numbers, got ${parts.length}.`);
    }
    return parts.map((part) => wholeNumber(field, part, 0, MAX_TOKENS, "each must be"));
  }

  function oneOf(field, text, choices) {
    if (choices.includes(text)) return text;
    throw new FieldError(field, `must be one of ${choices.join(", ")}, got ${quoted(text)}.`);
  }

  const FIELDS = {
    extend: {
      name: "New tokens",
      label: "New tokens of each sequence (extend)",
      hint: "One number for each sequence, with commas in between.",
      start: "24, 10",
      read: (text) => lengths("extend", text),
    },
    prefix: {
      name: "Cached tokens",
      label: "Cached tokens before them (prefix)",
      hint: "As many numbers; leave it empty for no prefix.",
      start: "8, 0",
      read: (text) => (text.trim() ? lengths("prefix", text) : []),
    },
    ranks: {
      name: "Ranks",
      label: "Ranks",
      hint: "1 to 256",
      start: "4",
      read: (text) => wholeNumber("ranks", text, 1, 256),
    },
    strategy: {
      name: "Strategy",
      label: "Strategy",
      choices: STRATEGIES,
      start: "zigzag",
      read: (text) => oneOf("strategy", text, STRATEGIES),
    },
    pageSize: {
      name: "Page size",
      label: "Page size, in tokens",
      hint: "1 to 65,536",
      start: "128",
      read: (text) => wholeNumber("pageSize", text, 1, 65536),
    },
    heads: {
      name: "KV heads",
      label: "KV heads",
      hint: "1 to 128",
      start: "8",
      read: (text) => wholeNumber("heads", text, 1, 128),
    },
    headDim: {
      name: "head_dim",
      label: "head_dim",
      hint: "1 to 576",
      start: "128",
      read: (text) => wholeNumber("headDim", text, 1, 576),
    },
    dtype: {
      name: "dtype",
      label: "dtype",
      choices: Object.keys(ITEM_BYTES),
      start: "bfloat16",
      read: (text) => oneOf("dtype", text, Object.keys(ITEM_BYTES)),
    },
  };

  // The batch that texts of the fields stand for, or the errors of those that break a rule.
  function readAll(texts) {
    const batch = {};
    const errors = {};
    const attempt = (step) => {
      try {
        step();
      } catch (error) {
        if (!(error instanceof FieldError)) throw error;
        errors[error.field] = error.message;
      }
    };
    for (const [name, field] of Object.entries(FIELDS)) {
      attempt(() => (batch[name] = field.read(texts[name])));
    }
    if (batch.extend && batch.prefix) {
      attempt(() => {
        if (!batch.prefix.length) batch.prefix = batch.extend.map(() => 0);
        const [num, other] = [batch.extend.length, batch.prefix.length];
        if (num !== other) {
          const rule = `as many numbers as New tokens has (${num}), or none, got ${other}.`;
          throw new FieldError("prefix", rule);
        }
        const total = [...batch.extend, ...batch.prefix].reduce((a, b) => a + b, 0);
        if (total > MAX_TOKENS) {
          const rule = `with the cached ones at most ${shown(MAX_TOKENS)}, got ${shown(total)}.`;
          throw new FieldError("extend", rule);
        }
      });
    }
    return { batch, errors };
  }

  // Texts of the fields from the part of an address behind #, or null if it has none of them.
  function fromAddress(hash) {
    const given = new URLSearchParams(hash.replace(/^#/, ""));
    const names = Object.keys(FIELDS).filter((name) => given.has(name));
    if (!names.length) return null;
    return { prefix: "", ...Object.fromEntries(names.map((name) => [name, given.get(name)])) };
  }

  function toAddress(texts) {
    const tidy = (text) => encodeURIComponent(text.replace(/\s/g, "")).replaceAll("%2C", ",");
    return `#${Object.keys(FIELDS).map((name) => `${name}=${tidy(texts[name])}`).join("&")}`;
  }

  return { FIELDS, readAll, fromAddress, toAddress, shown };
})();
