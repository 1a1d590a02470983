// SPDX-License-Identifier: Apache-2.0
// The arithmetic of the explorer: what cpattn.build_cp_metadata, cpattn_lab.cost_model.rank_work and
// cpattn.can_apply_cp say of a batch. A test compares random plans with them. No page is needed here.
"use strict";

globalThis.cpattnPlan = (() => {
  const STRATEGIES = ["zigzag", "interleave", "contiguous"];
  const ITEM_BYTES = { bfloat16: 2, float16: 2, float32: 4 };

  // Lengths of `count` blocks of a sequence: as even as can be, longer ones first (zigzag), or cut
  // at multiples of a fraction (contiguous).
  function blockLengths(length, count, strategy) {
    const cut = (i) => Math.floor((length * i) / count);
    return Array.from({ length: count }, (_, i) =>
      strategy === "zigzag"
        ? Math.floor(length / count) + (i < length % count ? 1 : 0)
        : cut(i + 1) - cut(i),
    );
  }

  // The rank of block i of a sequence that zigzag cuts into two blocks for each rank.
  const zigzagOwner = (i, ranks) => (i < ranks ? i : 2 * ranks - 1 - i);

  // The blocks of one sequence that has any: begin and end among its new tokens, and the owner.
  function blocksOf(length, ranks, strategy) {
    const count = strategy === "zigzag" ? 2 * ranks : ranks;
    let begin = 0;
    return blockLengths(length, count, strategy).map((size, i) => {
      const block = {
        begin,
        end: (begin += size),
        rank: strategy === "zigzag" ? zigzagOwner(i, ranks) : i,
        half: strategy === "zigzag" && i >= ranks ? "next" : "prev",
      };
      return block;
    });
  }

  // Keys that `rows` queries see, of which the first one sees `first` and each other `step` more.
  const pairsOf = (rows, first, step) => (rows ? rows * first + step * ((rows * (rows - 1)) / 2) : 0);

  const sum = (values) => values.reduce((total, value) => total + value, 0);

  function makePlan(batch) {
    const { extend, prefix, ranks, strategy } = batch;
    const perRank = Array.from({ length: ranks }, (_, rank) => ({
      rank,
      tokens: 0,
      pairs: 0,
      queries: [], // of each sequence, under interleave
      prevQueries: [],
      nextQueries: [],
      prevKeys: [],
      nextKeys: [],
    }));
    let offset = 0; // of the sequence in the batch
    const sequences = extend.map((length, s) => {
      const sequence = { length, prefix: prefix[s], offset, blocks: null };
      if (strategy === "interleave") {
        for (const each of perRank) {
          const first = (((each.rank - offset) % ranks) + ranks) % ranks;
          const rows = first < length ? Math.ceil((length - first) / ranks) : 0;
          each.queries.push(rows);
          each.tokens += rows;
          each.pairs += pairsOf(rows, prefix[s] + first + 1, ranks);
        }
      } else {
        sequence.blocks = blocksOf(length, ranks, strategy);
        for (const block of sequence.blocks) {
          const each = perRank[block.rank];
          const rows = block.end - block.begin;
          each[`${block.half}Queries`].push(rows);
          each[`${block.half}Keys`].push(prefix[s] + block.end);
          each.tokens += rows;
          each.pairs += pairsOf(rows, prefix[s] + block.begin + 1, 1);
        }
      }
      offset += length;
      return sequence;
    });
    const rowBytes = batch.heads * 2 * batch.headDim * ITEM_BYTES[batch.dtype];
    for (const each of perRank) {
      each.sentBytes = each.tokens * rowBytes * (ranks - 1);
      each.receivedBytes = (offset - each.tokens) * rowBytes;
    }
    const align = strategy === "zigzag" ? 2 * ranks : ranks;
    const meanPairs = sum(perRank.map((each) => each.pairs)) / ranks;
    const pages = sum(extend.map((length, s) => Math.ceil((prefix[s] + length) / batch.pageSize)));
    return {
      ...batch,
      sequences,
      perRank,
      numTokens: offset,
      meanPairs,
      imbalance: meanPairs ? Math.max(...perRank.map((each) => each.pairs)) / meanPairs : 1,
      paddedRows: Math.ceil(Math.max(...perRank.map((each) => each.tokens)) / align) * align,
      rowBytes,
      pages,
      pageBytes: pages * batch.pageSize * rowBytes,
      applies: applies(extend, ranks, strategy),
    };
  }

  // Whether engines split such a batch at all, by the rule of cpattn.can_apply_cp.
  function applies(extend, ranks, strategy) {
    if (ranks < 2) return false;
    const least = { zigzag: 2 * ranks, contiguous: ranks, interleave: 0 }[strategy];
    return sum(extend) >= Math.max(least, ranks) && Math.min(...extend) >= least;
  }

  // The owner of a new token, by its index in its sequence.
  function ownerOf(sequence, token, ranks) {
    if (!sequence.blocks) return (sequence.offset + token) % ranks;
    return sequence.blocks.find((block) => token < block.end).rank;
  }

  // The owner of every new token of the batch, in its order.
  function ownersOf(plan) {
    return plan.sequences.flatMap((sequence) =>
      Array.from({ length: sequence.length }, (_, token) => ownerOf(sequence, token, plan.ranks)),
    );
  }

  return { STRATEGIES, ITEM_BYTES, makePlan, ownerOf, ownersOf };
})();
