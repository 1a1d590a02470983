// SPDX-License-Identifier: Apache-2.0
#pragma once

// P V for the few rows of few_rows-inl.h. Needs the vector layer and the tiles included first.
#include "kernels/attention/amx/few_rows_workspace-inl.h"
#include "kernels/attention/amx/pending-inl.h"
#include "kernels/attention/amx/tile_rows-inl.h"
#include "kernels/engines/amx/products-inl.h"

namespace cpattn::kernels {
namespace {

template <class T>
struct FewRowsValues {
  using Format = TileFormat<T>;

  const FewRowsWorkspace<T>& work;
  TileRows<T>& packed;
  PendingSums& pending;
  int column_tiles;  // tiles of a row of V

  /// Adds P V and row sums of a chunk to those of the block, for sixteen rows, whose sums fit in
  /// the L1.
  void add_chunk(const SoftmaxGroup<T>& group, int chunk, bool first) const {
    const Bfloat16* p = group.probabilities_of(0, chunk);
    const Bfloat16* values = packed.values_of(chunk);
    const int64_t stride = packed.column_stride();
    float* sums = work.block_sums;
    int column = 0;
    if constexpr (Format::kSumsByProducts) {
      const Bfloat16* columns[4] = {work.ones, values, values + stride, values + 2 * stride};
      column = static_cast<int>(smaller(4, 1 + column_tiles));
      add_product<Format>(p, columns, column, first, sums);
      sums += column * kTileFloats;
      values += (column - 1) * stride;
      --column;
    }
    for (int count = 0; column < column_tiles; column += count, values += count * stride) {
      const Bfloat16* columns[4] = {
          values, values + stride, values + 2 * stride, values + 3 * stride
      };
      count = static_cast<int>(smaller(4, column_tiles - column));
      add_product<Format>(p, columns, count, first, sums);
      sums += count * kTileFloats;
    }
  }

  /// Packs and adds all chunks of the block again, starting from zero.
  [[gnu::noinline]] void add_chunks_again(
      const SoftmaxGroup<T>& group, const SourceRows<T>& rows, int first_chunk, int end_chunk
  ) const {
    packed.forget_special();
    for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
      packed.pack_values(rows, chunk, [] {});
      add_chunk(group, chunk, chunk == first_chunk);
    }
  }

  /// Adds the sums of the block to those of the rows.
  void add_block(const SoftmaxGroup<T>& group) const {
    const float* sums = work.block_sums;
    if constexpr (Format::kSumsByProducts) {
      PendingColumn{sums, group.sums, kTileRows}.take_rest();
      sums += kTileFloats;
    }
    for (int d = 0; d < column_tiles; ++d, sums += kTileFloats) {
      PendingRows{sums, group.output + d * kGroupRows * kLanes, kTileRows}.take_rest();
    }
  }

  /// O += P V for the chunks of a block, and the sums of rows.
  void add_values(
      const SoftmaxGroup<T>& group, int row_tiles, int first_chunk, int end_chunk
  ) const {
    switch (row_tiles) {
      case 2:
        return add_values<2, 2>(group, first_chunk, end_chunk);
      case 3:
        return add_values<3, 1>(group, first_chunk, end_chunk);
      default:
        return add_values<4, 1>(group, first_chunk, end_chunk);
    }
  }

  /// O += P V, and the sums of rows, kColumns column tiles at a time.
  template <int kRowTiles, int kColumns>
  void add_values(const SoftmaxGroup<T>& group, int first_chunk, int end_chunk) const {
    constexpr int kSums = Format::kSumsByProducts ? 1 : 0;
    const int count = column_tiles + kSums;
    for (int column = 0; column < count; column += kColumns) {
      const Bfloat16* values[kColumns];
      int64_t strides[kColumns];
      for (int i = 0; i < kColumns; ++i) {
        // Columns after the last repeat it.
        const int place = static_cast<int>(smaller(column + i, count - 1)) - kSums;
        values[i] =
            place < 0 ? work.ones : packed.values_of(first_chunk) + place * packed.column_stride();
        strides[i] = place < 0 ? 0 : packed.chunk_stride();
      }
      multiply_value_columns<Format, kRowTiles, kColumns>(
          group.probabilities_of(0, first_chunk), values, strides, end_chunk - first_chunk, pending,
          work.product
      );
      pending.flush();
      for (int i = 0; i < kColumns && column + i < count; ++i) {
        const float* product = work.product + i * kRowTiles * kTileFloats;
        const int place = column + i - kSums;
        if (place < 0) {
          PendingColumn{product, group.sums, kRowTiles * kTileRows}.take_rest();
        } else {
          float* output = group.output + place * kGroupRows * kLanes;
          PendingRows{product, output, kRowTiles * kTileRows}.take_rest();
        }
      }
    }
  }
};

}  // namespace
}  // namespace cpattn::kernels
