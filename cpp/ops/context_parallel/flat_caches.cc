// SPDX-License-Identifier: Apache-2.0
#include "ops/context_parallel/flat_caches.h"

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

/// One cache: slots * num_kv_heads * dim elements in one block of memory.
class FlatCache {
 public:
  FlatCache(
      const char* function,
      const char* name,
      const TensorView& cache,
      const CpAttentionArguments& arguments
  )
      : function_(function), name_(name), cache_(cache), arguments_(arguments) {}

  /// The pages of a cache whose dimension is known.
  int64_t num_pages(int64_t dim) const {
    const int64_t page_elements = arguments_.page_size * arguments_.num_kv_heads * dim;
    const int64_t elements = cache_.num_elements();
    check(
        elements % page_elements == 0, function_, ": ", name_,
        " must hold a multiple of page_size * num_kv_heads * head_dim = ", page_elements,
        " elements, got ", elements, " (shape ", ShapeOf{cache_}, ")"
    );
    return elements / page_elements;
  }

  /// The dimension of a cache whose number of pages is known; an empty cache has the dimension of
  /// another argument.
  int64_t dim(int64_t num_pages, int64_t dim_elsewhere) const {
    const int64_t elements = cache_.num_elements();
    if (num_pages == 0 && elements == 0 && dim_elsewhere > 0) return dim_elsewhere;
    const int64_t head_rows = num_pages * arguments_.page_size * arguments_.num_kv_heads;
    check(
        head_rows > 0 && elements > 0 && elements % head_rows == 0, function_, ": ", name_,
        " must hold a multiple of num_pages * page_size * num_kv_heads = ", head_rows,
        " elements (num_pages from k_cache), got ", elements
    );
    return elements / head_rows;
  }

  PagedCache paged(int64_t num_pages, int64_t dim) const {
    check_axes(dim);
    const int64_t row = arguments_.num_kv_heads * dim;
    PagedCache paged{
        .data = cache_.data,
        .dtype = cache_.dtype,
        .num_pages = num_pages,
        .page_size = arguments_.page_size,
        .num_kv_heads = arguments_.num_kv_heads,
        .head_dim = dim,
        .page_stride = arguments_.page_size * row,
        .row_stride = row,
        .head_stride = dim,
        .tensor = cache_,
    };
    if (!cache_.is_contiguous()) set_strides(dim, paged);
    return paged;
  }

 private:
  /// Reads the strides of a view into a larger cache, such as some of its heads. Only the axes of
  /// pages and their tokens may be joined.
  void set_strides(int64_t dim, PagedCache& paged) const {
    const int heads = cache_.rank - 2;  // this axis; the axis of dim follows it
    const bool apart =
        (cache_.rank == 3 || (cache_.rank == 4 && cache_.shape[1] == arguments_.page_size)) &&
        cache_.shape[heads] == arguments_.num_kv_heads && cache_.shape[heads + 1] == dim;
    check(
        apart && cache_.last_dim_contiguous(), function_, ": ", name_, " must be contiguous, or ",
        "[num_pages, page_size, num_kv_heads, dim] or [num_slots, num_kv_heads, dim] that is ",
        "contiguous in its last dimension, got shape ", ShapeOf{cache_}
    );
    paged.head_stride = cache_.strides[heads];
    paged.row_stride = cache_.strides[heads - 1];
    paged.page_stride =
        cache_.rank == 4 ? cache_.strides[0] : arguments_.page_size * paged.row_stride;
  }

  /// Throws if the axes contradict [num_pages, page_size, num_kv_heads, dim]: each axis must be one
  /// of these, or several of these joined.
  void check_axes(int64_t dim) const {
    const int64_t token = arguments_.num_kv_heads * dim;
    const int64_t page = arguments_.page_size * token;
    const int64_t elements = cache_.num_elements();
    int64_t behind = 1;  // elements of the axes after the current one
    bool fits = true;
    for (int axis = cache_.rank - 1; axis > 0; --axis) {
      behind *= cache_.shape[axis];
      fits = fits && (behind == 1 || behind == dim || behind == token || behind == page ||
                      behind == elements);
    }
    check(
        fits, function_, ": ", name_, " must be [num_pages, page_size, num_kv_heads, dim] with ",
        "page_size ", arguments_.page_size, ", num_kv_heads ", arguments_.num_kv_heads, " and dim ",
        dim, ", or have some of these axes joined, got shape ", ShapeOf{cache_}
    );
  }

  const char* function_;
  const char* name_;
  const TensorView& cache_;
  const CpAttentionArguments& arguments_;
};

/// A view of the first v_head_dim dimensions of the keys.
PagedCache start_of_keys(
    const char* function, const CpAttentionArguments& arguments, const PagedCache& keys
) {
  check(
      arguments.v_head_dim.has_value(), function,
      ": v_head_dim must be given without v_cache: values are the first v_head_dim dimensions of "
      "the keys"
  );
  const int64_t dim = check_head_dim(function, "v_head_dim", *arguments.v_head_dim);
  check(
      dim <= keys.head_dim, function, ": v_head_dim must be at most the ", keys.head_dim,
      " dimensions of k_cache, got ", dim
  );
  PagedCache values = keys;
  values.head_dim = dim;
  return values;
}

}  // namespace

FlatCaches flat_caches(
    const char* function, const CpAttentionArguments& arguments, int64_t head_dim, int64_t rope_dim
) {
  const FlatCache keys(function, "k_cache", arguments.k_cache, arguments);
  const int64_t num_pages = keys.num_pages(head_dim);
  FlatCaches caches{.k = keys.paged(num_pages, head_dim), .v = {}, .k_rope = std::nullopt};
  if (arguments.v_cache) {
    check(
        !arguments.v_head_dim, function,
        ": v_head_dim must not be given beside v_cache, which has "
        "it in its size, got ",
        arguments.v_head_dim.value_or(0)
    );
    const FlatCache values(function, "v_cache", *arguments.v_cache, arguments);
    const int64_t dim_of_out =
        arguments.out.rank == 2 ? arguments.out.shape[1] / arguments.num_heads : 0;
    caches.v = values.paged(num_pages, values.dim(num_pages, dim_of_out));
  } else {
    caches.v = start_of_keys(function, arguments, caches.k);
  }
  if (arguments.k_rope) {
    const FlatCache rope(function, "k_rope", *arguments.k_rope, arguments);
    const int64_t dim = rope.dim(num_pages, rope_dim);
    check(
        dim == rope_dim, function, ": k_rope must have the ", rope_dim,
        " dimensions of q_rope, got ", dim
    );
    caches.k_rope = rope.paged(num_pages, dim);
  }
  return caches;
}

}  // namespace cpattn
