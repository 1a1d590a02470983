// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/index_rows.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "cpattn/base/check.h"
#include "ops/base/kernel_table.h"
#include "ops/base/rows.h"
#include "ops/base/tensor_checks.h"

namespace cpattn {
namespace {

using kernels::kGroup;
using kernels::kHadamardLeast;

constexpr int64_t kTokenBytes = kGroup + int64_t{sizeof(float)};

/// Checks that a tensor of any shape is `count` contiguous numbers.
void check_dense(const char* function, const char* name, const TensorView& tensor, int64_t count) {
  check(
      tensor.num_elements() == count && tensor.is_contiguous(), function, ": ", name,
      " must be contiguous with ", count, " elements, got shape ", ShapeOf{tensor}
  );
}

int64_t last_dim(const TensorView& tensor) { return tensor.dim(tensor.rank - 1); }

/// The pages of keys, checked.
struct KeyPages {
  KeyPages(const char* name, const TensorView& tensor) : function(name), cache(tensor) {
    check_tensor(function, "cache", cache, 2);
    check_dtype(function, "cache", cache.dtype, DType::uint8);
    check(
        cache.dim(1) > 0 && cache.dim(1) % kTokenBytes == 0, function,
        ": cache must be [num_pages, page_size * ", kTokenBytes, "], got ", ShapeOf{cache}
    );
    page_size = cache.dim(1) / kTokenBytes;
  }

  void check_slots(std::span<const int64_t> slots, int64_t least) const {
    const int64_t count = cache.dim(0) * page_size;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      check(
          slots[i] >= least && slots[i] < count, function, ": slots must be in [", least, ", ",
          count, "), got ", slots[i], " at index ", i
      );
    }
  }

  char* codes(int64_t slot) const {
    return row_data(cache, slot / page_size) + slot % page_size * kGroup;
  }
  char* scale(int64_t slot) const {
    return row_data(cache, slot / page_size) + page_size * kGroup +
           slot % page_size * int64_t{sizeof(float)};
  }

  const char* function;
  const TensorView& cache;
  int64_t page_size;
};

}  // namespace

void hadamard_transform(const TensorView& x, float scale, const TensorView& out) {
  constexpr char kFunction[] = "hadamard_transform";
  const auto type = element_type(kFunction, "x", x.dtype);
  check_rank(kFunction, "x", x, 1, TensorView::kMaxRank);
  const int64_t dim = last_dim(x);
  check(
      dim > 0 && std::has_single_bit(static_cast<uint64_t>(dim)), kFunction,
      ": the last dimension of x must be a power of two, got shape ", ShapeOf{x}
  );
  check_dtype(kFunction, "out", out.dtype, x.dtype);
  check_dense(kFunction, "out", out, x.num_elements());
  check_no_overlap(kFunction, "out", out, "x", x);
  const auto transform = active_sparse_kernels().rows.hadamard[type];
  const int64_t row_bytes = dim * element_size(x.dtype);
  const int64_t count = std::max(dim, kHadamardLeast);
  parallel_rows(num_rows(x), row_bytes, [&](int64_t row, int64_t end) {
    auto* const scratch = static_cast<float*>(thread_scratch(kFunction, count * sizeof(float)));
    char* to = out.as<char>() + row * row_bytes;
    if (dim == count) {
      for (; row < end; ++row, to += row_bytes) {
        transform(row_data(x, row), dim, dim, scale, to, scratch);
      }
      return;
    }
    // The kernel takes at least kHadamardLeast numbers: short rows are joined first.
    alignas(float) char together[kHadamardLeast * sizeof(float)] = {};
    for (int64_t taken = 0; row < end; row += taken, to += taken * row_bytes) {
      taken = std::min(count / dim, end - row);
      for (int64_t i = 0; i < taken; ++i) {
        std::memcpy(together + i * row_bytes, row_data(x, row + i), row_bytes);
      }
      transform(together, count, dim, scale, together, scratch);
      std::memcpy(to, together, taken * row_bytes);
    }
  });
}

void quantize_index(
    const TensorView& x,
    bool power_of_two,
    const TensorView& codes,
    const TensorView& scale,
    const char* function,
    const char* name
) {
  const auto type = element_type(function, name, x.dtype);
  check_rank(function, name, x, 1, TensorView::kMaxRank);
  const int64_t dim = last_dim(x);
  check(
      dim > 0 && dim % kGroup == 0, function, ": the last dimension of ", name,
      " must be a multiple of ", kGroup, ", got shape ", ShapeOf{x}
  );
  const bool is_int8 = codes.dtype == DType::int8;
  check(!(is_int8 && power_of_two), function, ": scale_fmt 'ue8m0' is for float8_e4m3fn, not int8");
  if (!is_int8) check_dtype(function, "codes", codes.dtype, DType::float8_e4m3fn);
  check_dtype(function, "scale", scale.dtype, DType::float32);
  check_dense(function, "codes", codes, x.num_elements());
  check_dense(function, "scale", scale, x.num_elements() / kGroup);
  check_no_overlap(function, "codes", codes, name, x);
  check_no_overlap(function, "scale", scale, name, x);
  check_no_overlap(function, "scale", scale, "codes", codes);
  const auto format = is_int8        ? kernels::kGroupInt8
                      : power_of_two ? kernels::kGroupFloat8PowerOfTwo
                                     : kernels::kGroupFloat8;
  const auto quantize = active_sparse_kernels().rows.quantize_groups[type];
  // Contiguous rows are taken several at a time, which hides the latency of their scales.
  const int64_t together = x.is_contiguous() ? std::max<int64_t>(1, 8 * kGroup / dim) : 1;
  parallel_rows(num_rows(x), dim * element_size(x.dtype), [&](int64_t row, int64_t end) {
    for (; row < end; row += together) {
      quantize(
          row_data(x, row), std::min(together, end - row) * dim, format,
          codes.as<char>() + row * dim, scale.as<float>() + row * (dim / kGroup)
      );
    }
  });
}

void write_index_k_cache(
    const TensorView& cache,
    std::span<const int64_t> slots,
    const TensorView& codes,
    const TensorView& scale
) {
  constexpr char kFunction[] = "write_index_k_cache";
  const KeyPages pages(kFunction, cache);
  const auto count = static_cast<int64_t>(slots.size());
  check_rank(kFunction, "k", codes, 2, 3);
  check(
      codes.dtype == DType::float8_e4m3fn || codes.dtype == DType::int8 ||
          codes.dtype == DType::uint8,
      kFunction, ": k must be float8_e4m3fn, int8 or uint8 if k_scale is given, got ", codes.dtype
  );
  check(
      last_dim(codes) == kGroup && num_rows(codes) == count, kFunction, ": k must be [", count,
      ", ", kGroup, "], one row per slot, got ", ShapeOf{codes}
  );
  check_dtype(kFunction, "k_scale", scale.dtype, DType::float32);
  check_dense(kFunction, "k_scale", scale, count);
  check_no_overlap(kFunction, "cache", cache, "k", codes);
  check_no_overlap(kFunction, "cache", cache, "k_scale", scale);
  pages.check_slots(slots, -1);
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] < 0) continue;
    std::memcpy(pages.codes(slots[i]), row_data(codes, i), kGroup);
    std::memcpy(pages.scale(slots[i]), scale.as<float>() + i, sizeof(float));
  }
}

void read_index_k_cache(
    const TensorView& cache,
    std::span<const int64_t> slots,
    const TensorView& codes,
    const TensorView& scale
) {
  const KeyPages pages("read_index_k_cache", cache);
  pages.check_slots(slots, 0);
  const auto count = static_cast<int64_t>(slots.size());
  check_rows(pages.function, "codes", codes, {count, kGroup});
  check(element_size(codes.dtype) == 1, pages.function, ": codes must be bytes, got ", codes.dtype);
  check_dtype(pages.function, "scale", scale.dtype, DType::float32);
  check_dense(pages.function, "scale", scale, count);
  check_no_overlap(pages.function, "codes", codes, "cache", cache);
  check_no_overlap(pages.function, "scale", scale, "cache", cache);
  check_no_overlap(pages.function, "scale", scale, "codes", codes);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    std::memcpy(row_data(codes, i), pages.codes(slots[i]), kGroup);
    std::memcpy(scale.as<float>() + i, pages.scale(slots[i]), sizeof(float));
  }
}

}  // namespace cpattn
