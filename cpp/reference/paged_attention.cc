// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>
#include <numeric>

#include "cpattn/base/page_size.h"
#include "cpattn/base/parallel.h"
#include "cpattn/reference/reference.h"
#include "reference/codes.h"
#include "reference/key_biases.h"
#include "reference/rows.h"

namespace cpattn::reference {
namespace {

constexpr const char* kName = "reference.paged_attention: ";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// The factors of the keys or values of a cache, with strides of page, slot and head.
class Factors {
 public:
  Factors(
      const PagedAttention& batch,
      const Scale& scale,
      const char* name,
      int64_t num_pages,
      int64_t num_heads
  )
      : scale_(scale) {
    if (!scale.numbers) {
      check_positive(name, scale.number);
      return;
    }
    const TensorView& numbers = *scale.numbers;
    if (numbers.rank <= 1) {
      const int64_t count = numbers.num_elements();
      check(
          count == 1 || count == num_heads, kName, name, " must have 1 or ", num_heads,
          " numbers, got shape ", ShapeOf{numbers}
      );
      head_stride_ = count == 1 ? 0 : numbers.stride(0);
      for (int64_t head = 0; head < count; ++head) check_positive(name, at(0, 0, head));
      return;
    }
    check(
        numbers.rank == 3 || (numbers.rank == 2 && !batch.hnd), kName, name,
        " must be a number, [num_kv_heads], or one for each token and head, got shape ",
        ShapeOf{numbers}
    );
    const bool by_slot = numbers.rank == 2;
    const int slot_axis = by_slot ? 0 : batch.hnd ? 2 : 1;
    const int head_axis = by_slot || batch.hnd ? 1 : 2;
    check(
        numbers.dim(head_axis) == num_heads &&
            numbers.dim(slot_axis) == batch.page_size * (by_slot ? num_pages : 1) &&
            (by_slot || numbers.dim(0) == num_pages),
        kName, name, " must have a number for each token and head of ", num_pages, " pages of ",
        batch.page_size, " tokens and ", num_heads, " heads, got shape ", ShapeOf{numbers}
    );
    slot_stride_ = numbers.stride(slot_axis);
    head_stride_ = numbers.stride(head_axis);
    page_stride_ = by_slot ? slot_stride_ * batch.page_size : numbers.stride(0);
  }

  double at(int64_t page, int64_t slot, int64_t head) const {
    if (!scale_.numbers) return scale_.number;
    return read_element(
        *scale_.numbers, page * page_stride_ + slot * slot_stride_ + head * head_stride_
    );
  }

 private:
  static void check_positive(const char* name, double number) {
    check(
        number > 0 && std::isfinite(number), kName, name, " must be positive and finite, got ",
        number
    );
  }

  const Scale& scale_;
  int64_t page_stride_ = 0, slot_stride_ = 0, head_stride_ = 0;
};

/// A cache in any of its forms, with strides of page, slot and head.
struct Cache {
  const TensorView& tensor;
  int64_t num_pages, num_heads, head_dim;
  int64_t page_stride, slot_stride, head_stride;

  Cache(const PagedAttention& batch, const TensorView& cache, const char* name) : tensor(cache) {
    check(
        cache.rank == 4 || (cache.rank == 3 && !batch.hnd), kName, name,
        " must be [num_pages, page_size, num_kv_heads, head_dim], HND, or 3-D, got shape ",
        ShapeOf{cache}
    );
    check(cache.last_dim_contiguous(), kName, name, " must be contiguous in its last dimension");
    const int slot_axis = cache.rank == 3 ? 0 : batch.hnd ? 2 : 1;
    const int head_axis = batch.hnd ? 1 : cache.rank - 2;
    const int64_t slots = cache.dim(slot_axis);
    check(
        cache.rank == 3 ? slots % batch.page_size == 0 : slots == batch.page_size, kName, name,
        " must have pages of page_size = ", batch.page_size, ", got shape ", ShapeOf{cache}
    );
    num_pages = cache.rank == 3 ? slots / batch.page_size : cache.dim(0);
    num_heads = cache.dim(head_axis);
    head_dim = cache.dim(cache.rank - 1);
    slot_stride = cache.stride(slot_axis);
    head_stride = cache.stride(head_axis);
    page_stride = cache.rank == 3 ? slot_stride * batch.page_size : cache.stride(0);
  }

  /// All tokens of a sequence for one head, gathered and multiplied: [kv_len, head_dim].
  Matrix gather(
      const PagedAttention& batch, const Factors& factors, int64_t sequence, int64_t head
  ) const {
    Matrix rows(batch.kv_lens[sequence], head_dim);
    for (int64_t token = 0; token < rows.rows(); ++token) {
      const int64_t page = batch.block_tables.at(sequence, token / batch.page_size);
      const int64_t slot = token % batch.page_size;
      const int64_t offset = page * page_stride + slot * slot_stride + head * head_stride;
      rows.row(token) = read_row_or_codes(tensor, offset, head_dim) * factors.at(page, slot, head);
    }
    return rows;
  }
};

struct Row {
  Eigen::RowVectorXd out;
  double lse;
};

/// Computes the softmax over the keys that the row sees, and the sink; then weighs the values.
Row attend(
    const Eigen::RowVectorXd& q,
    const Matrix& keys,            // visible ones only
    const Matrix& values,          // of the same keys
    const Eigen::ArrayXd& biases,  // empty for none
    double scale,
    double softcap,
    double sink
) {
  if (keys.rows() == 0) return {Eigen::RowVectorXd::Zero(values.cols()), -kInfinity};
  Eigen::ArrayXd scores = scale * (keys * q.transpose());
  if (softcap > 0) scores = softcap * (scores / softcap).tanh();
  if (biases.size() > 0) scores += biases;
  const double max = scores.maxCoeff();
  // Eigen's own exp of -inf is above 0, so an infinite value would not give NaN.
  const Eigen::ArrayXd weights = (scores - max).unaryExpr([](double x) { return std::exp(x); });
  const double sum = weights.sum();
  return {
      weights.matrix().transpose() * values / (sum + std::exp(sink - max)), max + std::log(sum)
  };
}

/// The keys that query i of a sequence sees; `mask_begin` is the first bool of
/// the sequence in custom_mask.
std::vector<int64_t> visible_keys(
    const PagedAttention& batch, int64_t sequence, int64_t i, int64_t mask_begin
) {
  const int64_t kv_len = batch.kv_lens[sequence];
  const int64_t position = first_position(batch, sequence) + i;
  const bool causal = batch.causal_of_each ? (*batch.causal_of_each)[sequence] != 0 : batch.causal;
  const auto [left, right] = batch.window.value_or(KeyWindow{});
  std::vector<int64_t> keys;
  for (int64_t j = 0; j < kv_len; ++j) {
    const bool visible =
        (!causal || j <= position) && (!left || j - position >= -*left) &&
        (!right || j - position <= *right) &&
        (!batch.custom_mask || batch.custom_mask->as<const bool>()[mask_begin + i * kv_len + j]);
    if (visible) keys.push_back(j);
  }
  return keys;
}

/// Checks that the pages with keys of a sequence exist.
void check_pages(const PagedAttention& batch, int64_t sequence, int64_t num_pages) {
  const int64_t kv_len = batch.kv_lens[sequence];
  const int64_t pages = (kv_len + batch.page_size - 1) / batch.page_size;
  check(
      pages <= batch.block_tables.columns, kName, "block_tables must have ", pages,
      " columns for kv_len ", kv_len, " at index ", sequence, ", got ", batch.block_tables.columns
  );
  for (int64_t column = 0; column < pages; ++column) {
    const int64_t page = batch.block_tables.at(sequence, column);
    check(
        page >= 0 && page < num_pages, kName, "block_tables[", sequence, ", ", column,
        "] must be a page id below ", num_pages, ", got ", page
    );
  }
}

/// Numbers of tokens of all sequences, and of their pairs with keys.
struct Totals {
  int64_t rows = 0, pairs = 0;
};

Totals checked_lengths(const PagedAttention& batch, int64_t num_pages) {
  const std::size_t size = batch.q_lens.size();
  check(
      batch.kv_lens.size() == size && batch.block_tables.rows == static_cast<int64_t>(size), kName,
      "q_lens, kv_lens and block_tables must describe the same number of sequences, got ", size,
      ", ", batch.kv_lens.size(), " and ", batch.block_tables.rows
  );
  check(
      !batch.first_positions || batch.first_positions->size() == size, kName,
      "first_positions must have ", size, " ints"
  );
  Totals totals;
  for (std::size_t r = 0; r < size; ++r) {
    const int64_t q_len = batch.q_lens[r], kv_len = batch.kv_lens[r];
    check(
        std::min(q_len, kv_len) >= 0 && std::max(q_len, kv_len) <= INT32_MAX, kName,
        "lengths must be >= 0 and fit into int32, got q_len ", q_len, " and kv_len ", kv_len,
        " at index ", r
    );
    totals.rows += q_len;
    totals.pairs += q_len * kv_len;
    check_pages(batch, static_cast<int64_t>(r), num_pages);
  }
  return totals;
}

void check_tensors(
    const PagedAttention& batch, const Cache& k, const Cache& v, const Totals& totals
) {
  check_tensor("reference.paged_attention", "q", batch.q, 3);
  check(
      batch.q.dim(0) == totals.rows && batch.q.dim(2) == k.head_dim && k.num_heads == v.num_heads &&
          k.num_heads > 0 && batch.q.dim(1) % k.num_heads == 0,
      kName, "q must be [", totals.rows, ", a multiple of ", k.num_heads, ", ", k.head_dim,
      "] for these lengths and caches (v_cache has ", v.num_heads, " heads), got ", ShapeOf{batch.q}
  );
  check(
      !batch.sinks || (batch.sinks->rank == 1 && batch.sinks->dim(0) == batch.q.dim(1)), kName,
      "sinks must be [", batch.q.dim(1), "]"
  );
  check(
      !batch.custom_mask ||
          (batch.custom_mask->dtype == DType::bool8 && batch.custom_mask->is_contiguous() &&
           batch.custom_mask->num_elements() == totals.pairs),
      kName, "custom_mask must be ", totals.pairs, " contiguous bools"
  );
}

}  // namespace

void paged_attention(const PagedAttention& batch, const TensorView& out, const TensorView& lse) {
  check_page_size("reference.paged_attention", batch.page_size);
  check_key_window("reference.paged_attention", batch.window);
  const Cache k(batch, batch.k_cache, "k_cache");
  const Cache v(batch, batch.v_cache, "v_cache");
  const Factors k_factors(batch, batch.k_scale, "k_scale", k.num_pages, k.num_heads);
  const Factors v_factors(batch, batch.v_scale, "v_scale", v.num_pages, v.num_heads);
  check_tensors(batch, k, v, checked_lengths(batch, std::min(k.num_pages, v.num_pages)));
  const KeyBiases bias(batch);

  const auto num_sequences = static_cast<int64_t>(batch.q_lens.size());
  std::vector<int64_t> row_begin(num_sequences + 1), mask_begin(num_sequences + 1);
  for (int64_t r = 0; r < num_sequences; ++r) {
    row_begin[r + 1] = row_begin[r] + batch.q_lens[r];
    mask_begin[r + 1] = mask_begin[r] + batch.q_lens[r] * batch.kv_lens[r];
  }
  const int64_t num_heads = batch.q.dim(1);
  const int64_t group = num_heads / k.num_heads;
  const auto run = [&](int64_t item, StopToken& stop) {
    const int64_t sequence = item / k.num_heads, kv_head = item % k.num_heads;
    const Matrix keys = k.gather(batch, k_factors, sequence, kv_head);
    const Matrix values = v.gather(batch, v_factors, sequence, kv_head);
    for (int64_t i = 0; i < batch.q_lens[sequence] && !stop.should_stop(); ++i) {
      std::vector<int64_t> seen = visible_keys(batch, sequence, i, mask_begin[sequence]);
      const std::vector<int64_t> visible = seen;
      Matrix seen_keys = keys(seen, Eigen::all), seen_values = values(seen, Eigen::all);
      Eigen::ArrayXd biases;
      const int64_t row = row_begin[sequence] + i;
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        if (bias.any()) {
          biases = bias.of_row(sequence, i, head, visible, seen);
          seen_keys = keys(seen, Eigen::all);
          seen_values = values(seen, Eigen::all);
        }
        const auto q =
            read_row(batch.q, row * batch.q.stride(0) + head * batch.q.stride(1), k.head_dim);
        const double sink =
            batch.sinks ? read_element(*batch.sinks, head * batch.sinks->stride(0)) : -kInfinity;
        const Row result =
            attend(q, seen_keys, seen_values, biases, batch.scale, batch.softcap, sink);
        const int64_t index = row * num_heads + head;
        Eigen::Map<Eigen::RowVectorXd>(out.as<double>() + index * v.head_dim, v.head_dim) =
            result.out;
        lse.as<double>()[index] = result.lse;
      }
    }
  };
  parallel_for(num_sequences * k.num_heads, default_num_threads(), run);
}

}  // namespace cpattn::reference
