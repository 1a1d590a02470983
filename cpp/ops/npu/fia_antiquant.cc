// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/fia_antiquant.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpattn/base/parallel.h"
#include "ops/base/kernel_table.h"
#include "ops/npu/fia_layout.h"

namespace cpattn::fia {
namespace {

/// The unit that has one number, by the values of key_antiquant_mode.
enum AntiquantMode { kChannel, kToken, kHead, kTokenOfHead, kSlot, kSlotOfHead };

/// One argument: its tensor, and its name in errors.
struct NamedNumbers {
  const char* name;
  TensorView tensor;
};

struct AntiquantSide {
  int64_t mode;
  NamedNumbers scale;
  std::optional<NamedNumbers> offset;
};

/// The half of a tensor [2, ...] for key or value.
NamedNumbers half(const char* name, const TensorView& both, int index) {
  require(
      both.rank >= 1 && both.shape[0] == 2, name, " must be [2, ...], of key and value, got shape ",
      ShapeOf{both}
  );
  TensorView tensor = both;
  tensor.rank = both.rank - 1;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    tensor.shape[axis] = both.shape[axis + 1];
    tensor.strides[axis] = both.strides[axis + 1];
  }
  tensor.data = both.as<char>() + index * both.strides[0] * element_size(both.dtype);
  return {name, tensor};
}

/// The arguments of key (0) or value (1); the common arguments count unless they have their own.
AntiquantSide read_side(const FiaArguments& arguments, int index) {
  if (!arguments.key_antiquant.scale) {
    AntiquantSide side{
        arguments.antiquant.mode, half("antiquant_scale", *arguments.antiquant.scale, index), {}
    };
    if (arguments.antiquant.offset) {
      side.offset = half("antiquant_offset", *arguments.antiquant.offset, index);
    }
    return side;
  }
  const FiaAntiquant& given = index == 0 ? arguments.key_antiquant : arguments.value_antiquant;
  AntiquantSide side{
      given.mode, {index == 0 ? "key_antiquant_scale" : "value_antiquant_scale", *given.scale}, {}
  };
  if (given.offset) {
    side.offset = {index == 0 ? "key_antiquant_offset" : "value_antiquant_offset", *given.offset};
  }
  return side;
}

/// Whether the axes of a tensor, up to leading ones, are these.
bool has_axes(const TensorView& tensor, std::initializer_list<int64_t> axes) {
  const auto size = static_cast<int>(axes.size());
  if (tensor.rank < size) return false;
  const auto* first = tensor.shape.data();
  const auto* last = first + tensor.rank;
  return std::all_of(first, last - size, [](int64_t n) { return n == 1; }) &&
         std::equal(axes.begin(), axes.end(), last - size);
}

std::vector<float> widened(const char* name, const TensorView& tensor) {
  std::vector<float> numbers(tensor.num_elements());
  const kernels::ElementType type = element_type(kFunction, name, tensor.dtype);
  active_sparse_kernels().rows.widen[type](
      tensor.data, static_cast<int64_t>(numbers.size()), numbers.data()
  );
  return numbers;
}

/// Numbers of channels or heads: few, in the dtype of query.
AntiquantNumbers read_channels(
    const NamedNumbers& given, int64_t mode, DType dtype, const PagedCache& cache
) {
  const TensorView& tensor = given.tensor;
  const int64_t heads = cache.num_kv_heads, dim = cache.head_dim;
  require(
      tensor.dtype == dtype && tensor.is_contiguous(), given.name, " must be contiguous and of ",
      dtype, " like query in mode ", mode, ", got ", tensor.dtype, " of shape ", ShapeOf{tensor}
  );
  AntiquantNumbers numbers{.tensor = tensor};
  if (mode == kHead) {
    require(
        tensor.rank == 1 && tensor.shape[0] == heads, given.name, " must be [", heads,
        "], one for each head, in mode 2, got shape ", ShapeOf{tensor}
    );
    numbers.heads = widened(given.name, tensor);
  } else if (tensor.rank <= 1 && tensor.num_elements() == 1) {
    numbers.heads.assign(heads, widened(given.name, tensor)[0]);
  } else {
    require(
        has_axes(tensor, {heads, 1, dim}) || has_axes(tensor, {heads, dim}) ||
            has_axes(tensor, {heads * dim}),
        given.name, " must be one number, [N, 1, D], [N, D] or [H] with N = ", heads, ", D = ", dim,
        " in mode 0, got shape ", ShapeOf{tensor}
    );
    numbers.channels = widened(given.name, tensor);
  }
  return numbers;
}

/// Numbers of tokens, which are not copied.
AntiquantNumbers read_tokens(
    const NamedNumbers& given,
    int64_t mode,
    bool paged,
    const Sequences& sequences,
    const PagedCache& cache
) {
  const TensorView& tensor = given.tensor;
  const bool by_block = mode == kSlot || mode == kSlotOfHead;
  const bool by_head = mode == kTokenOfHead || mode == kSlotOfHead;
  require(!by_block || paged, given.name, " of mode ", mode, " needs block_table");
  const int rank = by_head ? 3 : 2;
  const int first = tensor.rank == rank + 1 && tensor.shape[0] == 1 ? 1 : 0;
  const int64_t outer = by_block ? cache.num_pages : sequences.size();
  const int64_t tokens = by_block ? cache.page_size : sequences.max_kv_len;
  const auto last = tensor.rank - 1;
  require(
      tensor.rank == first + rank && tensor.shape[first] == outer &&
          (!by_head || tensor.shape[first + 1] == cache.num_kv_heads) &&
          (by_block ? tensor.shape[last] == tokens : tensor.shape[last] >= tokens),
      given.name, " must be [", by_block ? "blocks, " : "B, ", by_head ? "N, " : "",
      by_block ? "block_size" : "S2 or more", "] in mode ", mode, ", of ", outer, " and ", tokens,
      ", got shape ", ShapeOf{tensor}
  );
  require(
      tensor.dtype == DType::float32 && tensor.last_dim_contiguous(), given.name,
      " must be float32 and contiguous in its last dimension in mode ", mode, ", got ", tensor.dtype
  );
  return {
      .tokens = tensor.as<const float>(),
      .tensor = tensor,
      .by_block = by_block,
      .outer_stride = tensor.strides[first],
      .head_stride = by_head ? tensor.strides[first + 1] : 0,
  };
}

AntiquantCache read_cache_numbers(
    const FiaArguments& arguments, int index, const Sequences& sequences, const PagedCache& cache
) {
  const AntiquantSide side = read_side(arguments, index);
  const auto read = [&](const NamedNumbers& given) {
    if (side.mode == kChannel || side.mode == kHead) {
      return read_channels(given, side.mode, arguments.query.dtype, cache);
    }
    return read_tokens(given, side.mode, arguments.block_table.has_value(), sequences, cache);
  };
  AntiquantCache result{cache, read(side.scale), {}};
  if (side.offset) result.offset = read(*side.offset);
  return result;
}

/// The scale of codes without offsets, if it has one factor for each head or row of memory.
std::optional<KVScale> as_scale(const AntiquantCache& cache, bool paged) {
  const AntiquantNumbers& scale = cache.scale;
  const bool by_row = scale.tokens != nullptr && (scale.by_block || !paged);
  const auto is_factor = [](float x) { return x > 0 && std::isfinite(x); };
  const bool by_head =
      !scale.heads.empty() && std::all_of(scale.heads.begin(), scale.heads.end(), is_factor);
  if (cache.offset || (!by_row && !by_head)) return std::nullopt;
  KVScale result;
  if (by_head) {
    result.heads = TensorView{
        .data = const_cast<float*>(scale.heads.data()),
        .dtype = DType::float32,
        .rank = 1,
        .shape = {cache.codes.num_kv_heads},
        .strides = {1},
    };
    return result;
  }
  result.tokens = PagedCache{
      .data = const_cast<float*>(scale.tokens),
      .dtype = DType::float32,
      .num_pages = cache.codes.num_pages,
      .page_size = cache.codes.page_size,
      .num_kv_heads = cache.codes.num_kv_heads,
      .head_dim = 1,
      .page_stride = scale.outer_stride,
      .row_stride = 1,
      .head_stride = scale.head_stride,
      .tensor = scale.tensor,
  };
  return result;
}

/// Writes the rows of a sequence, [kv_len, N, D].
void expand_rows(
    const AntiquantCache& cache,
    DType dtype,
    const PageTable& pages,
    int64_t sequence,
    int64_t kv_len,
    std::byte* out
) {
  constexpr int64_t kTokens = 64;  // of an item of work
  const PagedCache& codes = cache.codes;
  const int64_t heads = codes.num_kv_heads, dim = codes.head_dim;
  const auto dequantize =
      active_sparse_kernels().rows.dequantize_int8[element_type(kFunction, "query", dtype)];
  const int32_t* page_ids = pages.page_ids.data() + pages.indptr[sequence];
  const auto run = [&](int64_t item, StopToken& stop) {
    std::vector<float> scales(dim), offsets(dim);
    // A row of numbers: one for each channel, or one number everywhere.
    const auto row = [dim](
                         const AntiquantNumbers& numbers, int64_t outer, int64_t token,
                         int64_t head, std::vector<float>& filled
                     ) -> const float* {
      if (!numbers.channels.empty()) return numbers.channels.data() + head * dim;
      std::fill(filled.begin(), filled.end(), numbers.at(outer, token, head));
      return filled.data();
    };
    const int64_t last = std::min(kv_len, (item + 1) * kTokens);
    for (int64_t token = item * kTokens; token < last && !stop.should_stop(); ++token) {
      const int64_t page = page_ids[token / codes.page_size], slot = token % codes.page_size;
      for (int64_t head = 0; head < heads; ++head) {
        const auto numbers_of = [&](const AntiquantNumbers& numbers, std::vector<float>& filled) {
          return numbers.by_block ? row(numbers, page, slot, head, filled)
                                  : row(numbers, sequence, token, head, filled);
        };
        dequantize(
            static_cast<const int8_t*>(codes.data) + page * codes.page_stride +
                slot * codes.row_stride + head * codes.head_stride,
            numbers_of(cache.scale, scales),
            cache.offset ? numbers_of(*cache.offset, offsets) : nullptr, dim,
            out + (token * heads + head) * dim * element_size(dtype)
        );
      }
    }
  };
  parallel_for((kv_len + kTokens - 1) / kTokens, default_num_threads(), run);
}

}  // namespace

void check_antiquant(const FiaArguments& arguments, const Layout& layout) {
  const FiaAntiquant &both = arguments.antiquant, &key = arguments.key_antiquant,
                     &value = arguments.value_antiquant;
  require(
      key.scale.has_value() == value.scale.has_value(),
      "key_antiquant_scale and value_antiquant_scale must be given together"
  );
  require(
      key.offset.has_value() == value.offset.has_value(),
      "key_antiquant_offset and value_antiquant_offset must be given together"
  );
  require(!both.offset || both.scale, "antiquant_offset needs antiquant_scale");
  require(!key.offset || key.scale, "key_antiquant_offset needs key_antiquant_scale");
  require(
      both.mode == kChannel || both.mode == kToken, "antiquant_mode must be 0 or 1, got ", both.mode
  );
  for (const auto& [name, mode] :
       {std::pair("key_antiquant_mode", key.mode), std::pair("value_antiquant_mode", value.mode)}) {
    require(mode >= kChannel && mode <= kSlotOfHead, name, " must be in [0, 5], got ", mode);
  }
  require(
      key.mode == value.mode || (key.mode == kChannel && value.mode == kToken),
      "value_antiquant_mode must be key_antiquant_mode, or 1 beside 0, got ", value.mode,
      " beside ", key.mode
  );
  require(both.mode == 0 || both.scale, "antiquant_mode ", both.mode, " needs antiquant_scale");
  require(
      (key.mode == 0 && value.mode == 0) || key.scale,
      "key_antiquant_mode and value_antiquant_mode ", key.mode, " and ", value.mode,
      " need key_antiquant_scale and value_antiquant_scale"
  );
  const bool given = both.scale.has_value() || key.scale.has_value();
  for (const auto& [name, tensor] :
       {std::pair("key", &arguments.key), std::pair("value", &arguments.value)}) {
    if (!given) {
      require(
          tensor->dtype != DType::int8, name,
          " of int8 needs antiquant_scale, or key_antiquant_scale and value_antiquant_scale"
      );
      continue;
    }
    require(
        tensor->dtype == DType::int8, name, " must be int8 with ",
        key.scale ? "key_antiquant_scale" : "antiquant_scale", ", got ", tensor->dtype
    );
  }
  require(!given || !layout.packed(), arguments.input_layout, " does not take key of int8");
  require(!given || !arguments.query_rope, "query_rope is not for key of int8");
}

Antiquant::Antiquant(
    const FiaArguments& arguments,
    const Sequences& sequences,
    PageTable pages,
    const PagedCache& key,
    const PagedCache& value
)
    : dtype_(arguments.query.dtype),
      kv_lens_(sequences.kv_lens),
      pages_(std::move(pages)),
      key_(read_cache_numbers(arguments, 0, sequences, key)),
      value_(read_cache_numbers(arguments, 1, sequences, value)),
      paged_(arguments.block_table.has_value()) {}

bool Antiquant::set_scales(AttentionArguments& arguments) const {
  const auto k = as_scale(key_, paged_), v = as_scale(value_, paged_);
  if (!k || !v) return false;
  arguments.k_scale = *k;
  arguments.v_scale = *v;
  return true;
}

Antiquant::Expanded Antiquant::expand(int64_t sequence) const {
  const int64_t kv_len = kv_lens_[sequence];
  const auto bytes = [&](const AntiquantCache& cache) {
    return kv_len * cache.codes.num_kv_heads * cache.codes.head_dim * element_size(dtype_);
  };
  Expanded expanded{
      .memory = std::make_unique_for_overwrite<std::byte[]>(bytes(key_) + bytes(value_))
  };
  const auto page_of = [&](const AntiquantCache& cache, std::byte* data) {
    expand_rows(cache, dtype_, pages_, sequence, kv_len, data);
    const int64_t heads = cache.codes.num_kv_heads, dim = cache.codes.head_dim;
    const int64_t page_size = std::max<int64_t>(kv_len, 1);
    return PagedCache{
        .data = data,
        .dtype = dtype_,
        .num_pages = 1,
        .page_size = page_size,
        .num_kv_heads = heads,
        .head_dim = dim,
        .page_stride = page_size * heads * dim,
        .row_stride = heads * dim,
        .head_stride = dim,
        .tensor = {
            .data = data,
            .dtype = dtype_,
            .rank = 3,
            .shape = {kv_len, heads, dim},
            .strides = {heads * dim, dim, 1}
        },
    };
  };
  expanded.key = page_of(key_, expanded.memory.get());
  expanded.value = page_of(value_, expanded.memory.get() + bytes(key_));
  return expanded;
}

}  // namespace cpattn::fia
