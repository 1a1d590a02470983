// SPDX-License-Identifier: Apache-2.0
#pragma once

// The attention loop: for each block of keys, pack K and V once, then take a few
// query rows at a time through Q K^T, softmax and P V while the scores stay in
// L1. Needs the vector layer and an engine included first.
//
// Key blocks start at multiples of their length from key 0, whatever part of a
// sequence is asked for, so a row's result does not depend on its neighbours.
#include "kernels/attention_kernel.h"
#include "kernels/gemm-inl.h"
#include "kernels/softmax-inl.h"

namespace cpattn::kernels {
namespace {

/// Rows that go through the three steps together.
constexpr int kRowGroup = 24;
constexpr int kMaxBlockKeys = 256;
/// Packed K and V of a block stay below this, a third of a 1 MB L2.
constexpr int kBlockBytes = 288 * 1024;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/// Keys of one block: 256, or fewer for wide rows.
template <class Engine>
int block_keys(int qk_dim, int v_head_dim) {
  int keys = kMaxBlockKeys;
  const int row_bytes = (qk_dim + v_head_dim) * static_cast<int>(sizeof(typename Engine::Operand));
  while (keys > 64 && keys * row_bytes > kBlockBytes) keys /= 2;
  return keys;
}

inline void mark(const AttentionTile& tile, KernelScope scope, int64_t flops = 0) {
  if (tile.mark != nullptr) tile.mark(tile.mark_context, scope, flops);
}

/// Half-open range of keys.
struct KeyRange {
  int64_t begin, end;
};

inline KeyRange visible_keys(const AttentionTile& tile, int64_t token) {
  const int64_t position = tile.first_position + token * tile.position_step;
  return {
      larger(0, position - tile.left), larger(0, smaller(tile.kv_len, position + tile.right + 1))
  };
}

inline bool sees(const AttentionTile& tile, int64_t token, int64_t key) {
  const KeyRange range = visible_keys(tile, token);
  if (key < range.begin || key >= range.end) return false;
  return tile.mask == nullptr ||
         (tile.mask[token * tile.mask_stride + key / 8] >> key % 8 & 1) != 0;
}

/// Addresses of the rows of keys [begin, begin + n).
inline void locate_rows(
    const PagedRows& source,
    const AttentionTile& tile,
    int64_t begin,
    int n,
    int element_bytes,
    const char** rows
) {
  int64_t page = begin / tile.page_size;
  int64_t offset = begin % tile.page_size;
  const char* data = static_cast<const char*>(source.data);
  for (int i = 0; i < n; ++page, offset = 0) {
    const char* base = data + tile.pages[page] * source.page_stride * element_bytes;
    for (; i < n && offset < tile.page_size; ++i, ++offset) {
      rows[i] = base + offset * source.row_stride * element_bytes;
    }
  }
}

/// Carves aligned buffers out of the caller's scratch; from null it only counts.
struct Carver {
  char* base;
  int64_t used = 0;

  template <class T>
  void take(T*& buffer, int64_t elements) {
    buffer = reinterpret_cast<T*>(base + used);
    used += (elements * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  }
};

/// Buffers of one tile.
template <class Engine>
struct Workspace {
  using Operand = typename Engine::Operand;
  Operand* queries;        // [rows][qk_dim]
  Operand* keys;           // [panels of keys][qk_dim][kPanel]
  Operand* values;         // [panels of v_head_dim][block keys][kPanel]
  Operand* probabilities;  // [kRowGroup][block keys]
  float* scores;           // [kRowGroup][block keys]
  float* output;           // [rows][v_head_dim]
  float* zeros;            // [v_head_dim]
  RowState* states;        // [rows]
  int64_t bytes;

  Workspace(char* base, int64_t rows, int qk_dim, int v_head_dim) {
    const int64_t block = block_keys<Engine>(qk_dim, v_head_dim);
    Carver carver{base};
    carver.take(queries, rows * qk_dim);
    carver.take(keys, int64_t{round_up(block, kPanel)} * qk_dim);
    carver.take(values, block * round_up(v_head_dim, kPanel));
    carver.take(probabilities, kRowGroup * block);
    carver.take(scores, kRowGroup * block);
    carver.take(output, rows * v_head_dim);
    carver.take(zeros, v_head_dim);
    carver.take(states, rows);
    bytes = carver.used;
  }
};

template <class T, class Engine, int kExp2Degree>
class AttentionLoop {
  using Operand = typename Engine::Operand;

 public:
  static int64_t scratch_bytes(int64_t rows, int32_t qk_dim, int32_t v_head_dim) {
    return Workspace<Engine>(nullptr, rows, qk_dim, v_head_dim).bytes;
  }

  static bool run(const AttentionTile* tile, void* scratch) {
    return AttentionLoop(*tile, static_cast<char*>(scratch)).run();
  }

 private:
  AttentionLoop(const AttentionTile& tile, char* scratch)
      : tile_(tile),
        rows_(tile.num_tokens * tile.group),
        qk_dim_(tile.head_dim + tile.rope_dim),
        v_dim_(tile.v_head_dim),
        block_(block_keys<Engine>(qk_dim_, v_dim_)),
        work_(scratch, rows_, qk_dim_, v_dim_),
        factor_(tile.softcap > 0 ? kLog2E : tile.scale * kLog2E) {}

  bool run() {
    mark(tile_, kMarkPack);
    prepare_rows();
    const int64_t begin = visible_keys(tile_, 0).begin;
    const int64_t end = visible_keys(tile_, tile_.num_tokens - 1).end;
    for (int64_t first = begin / block_ * block_; begin < end && first < end; first += block_) {
      if (tile_.should_stop(tile_.stop_context)) return false;
      const int n = static_cast<int>(smaller(block_, end - first));
      mark(tile_, kMarkPack);
      pack_block(first, n, static_cast<int>(larger(0, begin - first)));
      for (int row = 0; row < rows_; row += kRowGroup) {
        attend(row, static_cast<int>(smaller(kRowGroup, rows_ - row)), first, n);
      }
    }
    mark(tile_, kMarkSoftmax);
    for (int row = 0; row < rows_; ++row) finish(row);
    return true;
  }

  void prepare_rows() {
    for (int row = 0; row < rows_; ++row) {
      const int64_t token = row / tile_.group;
      const int64_t head = row % tile_.group;
      Operand* packed = work_.queries + int64_t{row} * qk_dim_;
      const T* q = static_cast<const T*>(tile_.q);
      Engine::pack_query(
          q + token * tile_.q_token_stride + head * tile_.q_head_stride, tile_.head_dim, packed
      );
      if (tile_.rope_dim > 0) {
        const T* rope = static_cast<const T*>(tile_.q_rope);
        Engine::pack_query(
            rope + token * tile_.q_rope_token_stride + head * tile_.q_rope_head_stride,
            tile_.rope_dim, packed + tile_.head_dim
        );
      }
      work_.states[row] = {-__builtin_inff(), 0.0F};
    }
    __builtin_memset(work_.output, 0, sizeof(float) * rows_ * v_dim_);
    __builtin_memset(work_.zeros, 0, sizeof(float) * v_dim_);
  }

  /// Keys [first, first + n). The first `hidden` of them no token sees: they may
  /// hold anything, NaN too, so a visible one stands in for them.
  void pack_block(int64_t first, int n, int hidden) {
    const char* rows[kMaxBlockKeys];
    const auto locate = [&](const PagedRows& source) {
      locate_rows(source, tile_, first + hidden, n - hidden, sizeof(T), rows + hidden);
      for (int i = 0; i < hidden; ++i) rows[i] = rows[hidden];
    };
    const int64_t panel = int64_t{qk_dim_} * kPanel;
    locate(tile_.k);
    Engine::template pack_keys<T>(rows, n, tile_.head_dim, 0, panel, work_.keys);
    if (tile_.rope_dim > 0) {
      locate(tile_.k_rope);
      Engine::template pack_keys<T>(rows, n, tile_.rope_dim, tile_.head_dim, panel, work_.keys);
    }
    locate(tile_.v);
    const auto pack_values = [&](int* not_finite) {
      return Engine::template pack_values<T>(
          rows, n, v_dim_, int64_t{block_} * kPanel, work_.values, not_finite
      );
    };
    num_special_ = pack_values(special_keys_);
    if (num_special_ == 0) return;
    // Zero times an infinity is NaN, so such values must not meet the rows that
    // do not see them: zeros stand in for them, and add_special_value adds them.
    for (int i = 0; i < num_special_; ++i) {
      special_values_[i] = reinterpret_cast<const T*>(rows[special_keys_[i]]);
      rows[special_keys_[i]] = reinterpret_cast<const char*>(work_.zeros);
    }
    int still_special[kMaxBlockKeys];
    pack_values(still_special);
  }

  /// Rows [row, row + count) against keys [first, first + n).
  void attend(int row, int count, int64_t first, int n) {
    const int64_t first_token = row / tile_.group;
    const int64_t last_token = (row + count - 1) / tile_.group;
    const int64_t seen_from = visible_keys(tile_, first_token).begin - first;
    const int64_t seen_to = visible_keys(tile_, last_token).end - first;
    const int begin = static_cast<int>(larger(0, seen_from)) / kKeyGranule * kKeyGranule;
    const int end = round_up(static_cast<int>(smaller(n, seen_to)), kKeyGranule);
    if (begin >= end) return;

    const int64_t flops_per_dim = int64_t{2} * count * (end - begin);
    mark(tile_, kMarkQk, flops_per_dim * qk_dim_);
    multiply_panels<Engine, false>(
        count, work_.queries + int64_t{row} * qk_dim_, qk_dim_, work_.keys,
        int64_t{qk_dim_} * kPanel, 0, qk_dim_, begin, end, work_.scores, block_
    );
    mark(tile_, kMarkSoftmax);
    for (int i = 0; i < count; ++i) {
      float* scores = work_.scores + int64_t{i} * block_;
      const int64_t token = (row + i) / tile_.group;
      if (tile_.softcap > 0) apply_softcap(scores, begin, end, tile_.scale, tile_.softcap);
      hide_keys(scores, token, first, begin, end);
      softmax_row<kExp2Degree>(
          scores, work_.probabilities + int64_t{i} * block_, begin, end, factor_,
          work_.states[row + i], work_.output + int64_t{row + i} * v_dim_, v_dim_
      );
    }
    mark(tile_, kMarkPv, flops_per_dim * v_dim_);
    multiply_panels<Engine, true>(
        count, work_.probabilities + begin, block_, work_.values, int64_t{block_} * kPanel, begin,
        end - begin, 0, v_dim_, work_.output + int64_t{row} * v_dim_, v_dim_
    );
    for (int i = 0; i < num_special_; ++i) {
      add_special_value(row, count, first, special_keys_[i], special_values_[i]);
    }
  }

  /// O += P V for a key that pack_block left out, in the rows that see it.
  [[gnu::noinline]] void add_special_value(
      int row, int count, int64_t first, int key, const T* value
  ) const {
    for (int i = 0; i < count; ++i) {
      if (!sees(tile_, (row + i) / tile_.group, first + key)) continue;
      const Vector p = splat(Engine::probability(work_.probabilities + int64_t{i} * block_ + key));
      float* output = work_.output + int64_t{row + i} * v_dim_;
      for (int d = 0; d < v_dim_; d += kLanes) {
        store(output + d, fma(p, load(value + d), load(output + d)));
      }
    }
  }

  /// Sets the scores of keys that the token does not see to -inf.
  void hide_keys(float* scores, int64_t token, int64_t first, int begin, int end) const {
    const KeyRange seen = visible_keys(tile_, token);
    const float hidden = -__builtin_inff();
    const int from = static_cast<int>(larger(begin, smaller(end, seen.begin - first)));
    const int to = static_cast<int>(larger(begin, smaller(end, seen.end - first)));
    for (int j = begin; j < from; ++j) scores[j] = hidden;
    for (int j = to; j < end; ++j) scores[j] = hidden;
    if (tile_.mask == nullptr) return;
    const uint8_t* bits = tile_.mask + token * tile_.mask_stride + first / 8;
    for (int j = begin; j < end; j += kLanes) {
      uint16_t word;
      __builtin_memcpy(&word, bits + j / 16 * 2, sizeof word);
      store(scores + j, select(word >> j % 16, load(scores + j), splat(hidden)));
    }
  }

  /// Normalises a row and writes it.
  void finish(int row) const {
    const int64_t token = row / tile_.group;
    const int64_t head = row % tile_.group;
    const RowState state = work_.states[row];
    const float* output = work_.output + int64_t{row} * v_dim_;
    T* out =
        static_cast<T*>(tile_.out) + token * tile_.out_token_stride + head * tile_.out_head_stride;
    const float* sink = tile_.sinks == nullptr ? nullptr : tile_.sinks + head;
    const float scale = output_scale(state, sink);
    for (int d = 0; d < v_dim_; d += kLanes) store(out + d, mul(load(output + d), splat(scale)));
    if (tile_.lse != nullptr) {
      tile_.lse[token * tile_.lse_token_stride + head * tile_.lse_head_stride] = row_lse(state);
    }
  }

  const AttentionTile& tile_;
  const int rows_;
  const int qk_dim_;
  const int v_dim_;
  const int block_;
  const Workspace<Engine> work_;
  const float factor_;
  // Keys of the current block whose values are not all finite.
  int num_special_ = 0;
  int special_keys_[kMaxBlockKeys];
  const T* special_values_[kMaxBlockKeys];
};

template <class T>
void weighted_sum(float weight_a, void* a, float weight_b, const void* b, int64_t n) {
  T* x = static_cast<T*>(a);
  const T* y = static_cast<const T*>(b);
  int64_t i = 0;
  const auto step = [&](T* p, const T* q) {
    const Vector left = weight_a == 0 ? splat(0.0F) : mul(load(p), splat(weight_a));
    store(p, weight_b == 0 ? left : fma(load(q), splat(weight_b), left));
  };
  for (; i + kLanes <= n; i += kLanes) step(x + i, y + i);
  if (i < n) {
    T tail_x[kLanes] = {};
    T tail_y[kLanes] = {};
    __builtin_memcpy(tail_x, x + i, (n - i) * sizeof(T));
    __builtin_memcpy(tail_y, y + i, (n - i) * sizeof(T));
    step(tail_x, tail_y);
    __builtin_memcpy(x + i, tail_x, (n - i) * sizeof(T));
  }
}

/// The kernel of one storage type on one engine.
template <class T, class Engine, int kExp2Degree>
constexpr AttentionKernel attention_kernel() {
  using Loop = AttentionLoop<T, Engine, kExp2Degree>;
  return {&Loop::scratch_bytes, &Loop::run, &peak_flops<Engine>};
}

/// All kernels of an instruction set; what differs among them are the 16-bit types.
constexpr KernelTable kernel_table(
    const char* name,
    AttentionKernel bfloat16,
    AttentionKernel float16 = attention_kernel<Half, Float32Engine, 4>()
) {
  return {
      .name = name,
      .attention = {attention_kernel<float, Float32Engine, 6>(), float16, bfloat16},
      .weighted_sum = {&weighted_sum<float>, &weighted_sum<Half>, &weighted_sum<Bfloat16>},
  };
}

}  // namespace
}  // namespace cpattn::kernels
