// SPDX-License-Identifier: Apache-2.0
#pragma once

// The order in which a loop over several KV heads reads keys and values. Needs the vector layer and
// the tiles included first.
#include "kernels/attention/amx/source_rows-inl.h"
#include "kernels/rows/visibility-inl.h"

namespace cpattn::kernels {
namespace {

/// Walks the keys that a tile sees in blocks of kKeys, and in each block the heads: they are
/// neighbours in memory, whose pages are still in the TLB. A turn has the rows of one head in one
/// block. Those of the next turn are located already, to be fetched meanwhile.
template <class T, int kKeys>
class HeadTurns {
 public:
  explicit HeadTurns(const AttentionTile& tile) : tile_(tile), keys_(keys_of_tile(tile)) {
    locate(0, keys_.begin / kKeys * kKeys);
  }

  /// Goes to the next turn, past the blocks that no token sees. Returns false after the last.
  bool advance() {
    while (next_->count() > 0) {
      rows_ = next_;
      next_ = next_ == &sources_[0] ? &sources_[1] : &sources_[0];
      const int64_t first = rows_->first();
      const bool shown = any_shown(tile_.seen, 0, tile_.num_tokens, first, rows_->count());
      const bool last = !shown || rows_->head() + 1 == tile_.num_kv_heads;
      locate(last ? 0 : rows_->head() + 1, last ? first + kKeys : first);
      if (shown) return true;
    }
    return false;
  }

  /// The rows of this turn.
  const SourceRows<T>& rows() const { return *rows_; }

  /// Prefetches n rows of the next turn, or those that are left.
  void fetch(int n) const { next_->fetch(n); }
  void fetch_rest() const { next_->fetch(next_->count()); }

 private:
  void locate(int head, int64_t first) {
    const int n = keys_.begin < keys_.end
                      ? static_cast<int>(larger(0, smaller(kKeys, keys_.end - first)))
                      : 0;
    next_->locate(head, first, n, n == 0 ? 0 : static_cast<int>(larger(0, keys_.begin - first)));
  }

  const AttentionTile& tile_;
  const KeyRange keys_;  // that any token sees
  SourceRows<T> sources_[2] = {SourceRows<T>(tile_), SourceRows<T>(tile_)};
  SourceRows<T>* next_ = &sources_[0];
  SourceRows<T>* rows_ = nullptr;
};

}  // namespace
}  // namespace cpattn::kernels
