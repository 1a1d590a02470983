// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/move_rows.h"

#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "cpattn/base/tensor_view.h"
#include "ops/kv/slots.h"

namespace cpattn {
namespace {

/// Stands for the row that is kept while a cycle is moved round.
constexpr int64_t kKept = -1;

struct Move {
  int64_t source, target;
};

/// The moves in an order in which none overwrites a row that a later move reads.
class MoveOrder {
 public:
  MoveOrder(
      const char* function, std::span<const int64_t> sources, std::span<const int64_t> targets
  ) {
    for (std::size_t i = 0; i < targets.size(); ++i) {
      if (sources[i] < 0 || targets[i] < 0) continue;
      check(
          source_of_.emplace(targets[i], sources[i]).second, function,
          ": targets must differ, got ", targets[i], " again at index ", i
      );
    }
    for (const auto& [target, source] : source_of_) ++readers_[source];
    for (std::size_t i = 0; i < targets.size(); ++i) append_chain(targets[i]);
    // The other moves are cycles: each of their rows is read by one move.
    for (std::size_t i = 0; i < targets.size(); ++i) append_cycle(targets[i]);
  }

  const std::vector<Move>& moves() const { return moves_; }

 private:
  /// Appends the move to a slot that no later move reads, then the move to its source slot, and so
  /// on.
  void append_chain(int64_t slot) {
    auto move = source_of_.find(slot);
    while (move != source_of_.end() && readers_[move->first] == 0) {
      const auto [target, source] = *move;
      moves_.push_back({source, target});
      source_of_.erase(move);
      --readers_[source];
      move = source_of_.find(source);
    }
  }

  void append_cycle(int64_t first) {
    auto move = source_of_.find(first);
    if (move == source_of_.end()) return;
    if (move->second != first) moves_.push_back({first, kKept});
    for (int64_t target = first; move != source_of_.end(); move = source_of_.find(target)) {
      const int64_t source = move->second;
      source_of_.erase(move);
      if (source != target) moves_.push_back({source == first ? kKept : source, target});
      target = source;
    }
  }

  std::unordered_map<int64_t, int64_t> source_of_;  // by target; moves not yet in the order
  std::unordered_map<int64_t, int64_t> readers_;    // how many of them read a slot
  std::vector<Move> moves_;
};

/// Whether two caches may share rows. Caches that alternate in one allocation, like keys and values
/// of a page, share none: they have the same strides, and one begins within a gap of the other.
bool may_share_rows(const TensorView& a, const TensorView& b) {
  if (a.num_elements() == 0 || b.num_elements() == 0) return false;
  const int64_t size = element_size(a.dtype);
  const auto span = [size](const TensorView& x) {
    int64_t last = 0;
    for (int axis = 0; axis < x.rank; ++axis) last += (x.dim(axis) - 1) * x.stride(axis);
    return (last + 1) * size;
  };
  const TensorView& low = a.as<char>() < b.as<char>() ? a : b;
  const TensorView& high = &low == &a ? b : a;
  const int64_t apart = high.as<char>() - low.as<char>();
  if (apart >= span(low)) return false;
  for (int axis = 0; axis < a.rank; ++axis) {
    if (a.stride(axis) != b.stride(axis) || a.dtype != b.dtype) return true;
  }
  const auto is_axis = [&](int axis) { return a.dim(axis) > 1 || b.dim(axis) > 1; };
  for (int outer = 0; outer < a.rank; ++outer) {
    if (!is_axis(outer)) continue;
    int64_t inner_a = 1, inner_b = 1;  // elements within one step of the axis
    bool divides = true;               // the steps of the axes around it
    for (int axis = 0; axis < a.rank; ++axis) {
      if (axis == outer || !is_axis(axis)) continue;
      if (a.stride(axis) >= a.stride(outer)) {
        divides = divides && a.stride(outer) > 0 && a.stride(axis) % a.stride(outer) == 0;
        continue;
      }
      inner_a += (low.dim(axis) - 1) * low.stride(axis);
      inner_b += (high.dim(axis) - 1) * high.stride(axis);
    }
    const int64_t step = a.stride(outer) * size, rest = step > 0 ? apart % step : 0;
    if (divides && rest >= inner_a * size && rest + inner_b * size <= step) return false;
  }
  return true;
}

/// The rows of one head of a cache.
void move_head(
    const TensorView& cache, int64_t head, const std::vector<Move>& moves, StopToken& stop
) {
  const int64_t size = element_size(cache.dtype), bytes = cache.dim(3) * size;
  char* const rows = cache.as<char>() + head * cache.stride(1) * size;
  if (bytes == 0) return;
  std::vector<char> kept(bytes);
  const auto row = [&](int64_t slot) {
    if (slot == kKept) return kept.data();
    const int64_t page = slot / cache.dim(2), offset = slot % cache.dim(2);
    return rows + (page * cache.stride(0) + offset * cache.stride(2)) * size;
  };
  constexpr std::size_t kMovesOfAPoll = 4096;
  for (std::size_t i = 0; i < moves.size(); ++i) {
    if (i % kMovesOfAPoll == 0 && stop.should_stop()) return;
    std::memcpy(row(moves[i].target), row(moves[i].source), bytes);
  }
}

}  // namespace

void move_page_rows(
    const char* function,
    std::span<const int64_t> sources,
    std::span<const int64_t> targets,
    std::span<const TensorView> caches
) {
  check(
      sources.size() == targets.size(), function,
      ": sources and targets must have the same length, got ", sources.size(), " and ",
      targets.size()
  );
  std::vector<int64_t> first_head = {0};
  for (std::size_t i = 0; i < caches.size(); ++i) {
    const std::string name = concat("caches[", i, "]");
    check_tensor(function, name.c_str(), caches[i], 4);
    for (std::size_t earlier = 0; earlier < i; ++earlier) {
      check(
          !may_share_rows(caches[i], caches[earlier]), function, ": ", name,
          " must not have rows of caches[", earlier, "], which would be moved twice"
      );
    }
    const int64_t num_slots = caches[i].dim(0) * caches[i].dim(2);
    check_slots(function, "sources", sources, num_slots);
    check_slots(function, "targets", targets, num_slots);
    first_head.push_back(first_head.back() + caches[i].dim(1));
  }
  const MoveOrder order(function, sources, targets);
  parallel_for(first_head.back(), default_num_threads(), [&](int64_t item, StopToken& stop) {
    std::size_t i = 0;
    while (item >= first_head[i + 1]) ++i;
    move_head(caches[i], item - first_head[i], order.moves(), stop);
  });
}

}  // namespace cpattn
