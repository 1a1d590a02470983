// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scores of one query with packed keys. Needs the vector layer and the engines
// included first.
#include "kernels/boundary/indexer_kernel.h"
#include "kernels/engines/gemm-inl.h"
#include "kernels/rows/key_rows-inl.h"
#include "kernels/vector/fp8-inl.h"

namespace cpattn::kernels {
namespace {

/// Keys that are packed together: 128 KiB of 128 dimensions in bfloat16.
constexpr int kIndexerBlock = 512;

/// Heads that are multiplied at once: their sums, the columns of a panel and the scores fill the
/// registers.
constexpr int kScoreHeads = 4;

/// scores += weights[i] relu(q[i] . key) for kHeads heads and the keys of a panel.
template <class Engine, int kHeads>
[[gnu::always_inline]] inline void add_heads(
    const typename Engine::Operand* q,
    const float* weights,
    int dim,
    const typename Engine::Operand* panel,
    Vector* scores
) {
  constexpr int kStep = Engine::kDepthStep;
  typename Engine::Sum sum[kHeads][kPanelVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kHeads; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) {
      sum[i][j] = Engine::start(panel + int64_t{dim} * kPanel + j * kStep * kLanes);
    }
  }
  for (int d = 0; d < dim; d += kStep, panel += kStep * kPanel) {
    typename Engine::Pack keys[kPanelVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) {
      keys[j] = Engine::load_columns(panel + j * kStep * kLanes);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kHeads; ++i) {
      const auto x = Engine::splat_row(q + int64_t{i} * dim + d);
#pragma GCC unroll 4
      for (int j = 0; j < kPanelVectors; ++j) {
        sum[i][j] = Engine::multiply_add(x, keys[j], sum[i][j]);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kHeads; ++i) {
    const Vector weight = splat(weights[i]);
#pragma GCC unroll 4
    for (int j = 0; j < kPanelVectors; ++j) {
      // The order of the operands lets NaN through.
      scores[j] = fma(weight, max(splat(0.0F), Engine::value(sum[i][j])), scores[j]);
    }
  }
}

/// Rows that are prefetched to the L2 during products, a few after each: all at once they would
/// wait for miss buffers.
struct FetchedRows {
  const char* const* rows = nullptr;  // [kPanel] or null
  int row_bytes = 0;
};

/// Writes the scores of one query with the keys of a panel. Not inlined, so that nothing else
/// competes with the sums for registers.
template <class Engine>
[[gnu::noinline]] void score_panel(
    const typename Engine::Operand* q,
    const float* weights,
    int num_heads,
    int dim,
    const typename Engine::Operand* panel,
    FetchedRows fetched,
    float* out
) {
  Vector scores[kPanelVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kPanelVectors; ++j) scores[j] = splat(0.0F);
  const int groups = (num_heads + kScoreHeads - 1) / kScoreHeads;
  const int rows_of_group = (kPanel + groups - 1) / groups;
  for (int head = 0, row = 0; head < num_heads; q += int64_t{kScoreHeads} * dim) {
    if (fetched.rows != nullptr) {
      const int stop = static_cast<int>(smaller(row + rows_of_group, kPanel));
      for (; row < stop; ++row) fetch_row<2>(fetched.rows[row], fetched.row_bytes);
    }
    if (num_heads - head >= kScoreHeads) {
      add_heads<Engine, kScoreHeads>(q, weights + head, dim, panel, scores);
      head += kScoreHeads;
      continue;
    }
    for (; head < num_heads; ++head, q += dim) {
      add_heads<Engine, 1>(q, weights + head, dim, panel, scores);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < kPanelVectors; ++j) store(out + j * kLanes, scores[j]);
}

/// An engine as PanelScorer needs it, for queries and keys of type T: the operands, panels and
/// packing of engine-inl.h, and sums that need not be floats.
///
///   Sum                     the accumulator of products: a number for every lane
///   kStartRows              rows of a panel, after those of the dimensions, with the starts of
///                           its columns' sums: pack_keys() writes them. A multiple of kDepthStep
///   start(p)                the sums to start from, of the columns whose start rows are at p
///   multiply_add(a, b, sum) `a` is of queries, `b` of keys
///   value(sum)              the score of each column: q . key, as floats
template <class Engine, class T>
concept ScoreEngine = ProductEngine<Engine> && requires(
                                                   typename Engine::Pack pack,
                                                   typename Engine::Sum sum,
                                                   typename Engine::Operand* operands,
                                                   const T* source,
                                                   const char* const* rows,
                                                   int n,
                                                   int64_t panel_size
                                               ) {
  requires Engine::kStartRows % Engine::kDepthStep == 0;
  sum = Engine::multiply_add(pack, pack, sum);
  static_cast<typename Engine::Sum (*)(const typename Engine::Operand*)>(&Engine::start);
  static_cast<Vector (*)(typename Engine::Sum)>(&Engine::value);
  Engine::template pack_query<T>(source, n, operands);
  Engine::template pack_keys<T>(rows, n, n, n, n, panel_size, operands);
};

/// A matrix engine as an engine of scores: its sums are in float32 and start at zero.
template <class Base>
struct FloatScores : Base {
  using Operand = typename Base::Operand;
  static constexpr int kStartRows = 0;  // rows of a panel with the starts of sums
  using Sum = Vector;
  static Sum start(const Operand* /*panel*/) { return splat(0.0F); }
  static Vector value(Sum sum) { return sum; }

  template <class T>
  static void pack_query(const T* source, int dim, Operand* row) {
    if constexpr (kExpands<T>) {
      expand_row(source, dim, row);
    } else {
      Base::template pack_query<T>(source, dim, row);
    }
  }

  template <class T>
  static void pack_keys(
      const char* const* rows,
      int begin,
      int end,
      int dim,
      int first_row,
      int64_t panel_size,
      Operand* panels
  ) {
    if constexpr (kExpands<T>) {
      Operand expanded[kKeyGranule][kMaxIndexerDim];
      const char* found[2 * kKeyGranule];
      for (int i = 0; i < kKeyGranule; ++i) {
        // The base prefetches the addresses that follow its rows.
        found[kKeyGranule + i] = rows[begin + kKeyGranule + i];
        found[i] = reinterpret_cast<const char*>(expanded[i]);
        if (begin + i >= end) continue;
        expand_row(reinterpret_cast<const T*>(rows[begin + i]), dim, expanded[i]);
      }
      Operand* first = panels + begin / kPanel * panel_size + begin % kPanel * Base::kDepthStep;
      Base::template pack_keys<Operand>(found, 0, end - begin, dim, first_row, panel_size, first);
    } else {
      Base::template pack_keys<T>(rows, begin, end, dim, first_row, panel_size, panels);
    }
  }

 private:
  /// Codes become the operands of a bfloat16 engine row by row; the float32 engine loads codes
  /// itself.
  template <class T>
  static constexpr bool kExpands = sizeof(T) == 1 && sizeof(Operand) == 2;
};

/// A request to a Scorer: scores of keys [begin, end) of a block, key j's at scores[j]; scores
/// before and after, up to multiples of 64, may be anything.
struct ScoreTask {
  int index;  // of the query
  char* query;
  char* block;
  int begin, end;
  float* scores;
  const char* const* next = nullptr;  // rows of the next block, if it is time to fetch them
};

/// The Scorer of IndexerLoop on an engine, for queries and keys of type T.
template <class T, class Engine>
class PanelScorer {
  static_assert(ScoreEngine<Engine, T>);
  using Operand = typename Engine::Operand;

 public:
  static constexpr int kBlocks = 1;

  explicit PanelScorer(const IndexerTile& tile) : tile_(tile) {}

  static int64_t query_bytes(int num_heads, int dim) {
    return round_up(num_heads * dim * static_cast<int>(sizeof(Operand)), 64);
  }
  static int64_t block_bytes(int dim) {
    return panel_size(dim) * (kIndexerBlock / kPanel) * static_cast<int>(sizeof(Operand));
  }

  void pack_query(const IndexerQuery& asked, void* query) const {
    for (int h = 0; h < tile_.num_heads; ++h) {
      Engine::template pack_query<T>(
          static_cast<const T*>(asked.q) + h * tile_.head_stride, tile_.dim,
          static_cast<Operand*>(query) + h * tile_.dim
      );
    }
  }

  void pack_keys(const char* const* rows, int begin, int end, void* block) const {
    for (int key = begin; key < end; key += kKeyGranule) {
      const int stop = key + kKeyGranule < end ? key + kKeyGranule : end;
      Engine::template pack_keys<T>(
          rows, key, stop, tile_.dim, 0, panel_size(tile_.dim), static_cast<Operand*>(block)
      );
    }
  }

  template <class Done>
  void score(const ScoreTask& task, Done done) const {
    const auto* query = reinterpret_cast<const Operand*>(task.query);
    const auto* panels = reinterpret_cast<const Operand*>(task.block);
    FetchedRows fetched;
    for (int key = task.begin / kPanel * kPanel; key < task.end; key += kPanel) {
      if (task.next != nullptr) {
        fetched = {task.next + key, tile_.dim * static_cast<int>(sizeof(T))};
      }
      score_panel<Engine>(
          query, tile_.queries[task.index].weights, tile_.num_heads, tile_.dim,
          panels + key / kPanel * panel_size(tile_.dim), fetched, task.scores + key
      );
    }
    done(task.index);
  }

  template <class Done>
  void finish(const Done& /*done*/) const {}
  void resume() const {}

 private:
  static int64_t panel_size(int dim) { return int64_t{dim + Engine::kStartRows} * kPanel; }

  const IndexerTile& tile_;
};

}  // namespace
}  // namespace cpattn::kernels
