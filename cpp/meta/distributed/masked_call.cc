// SPDX-License-Identifier: Apache-2.0
#include <numeric>
#include <utility>

#include "meta/distributed/seen_rows.h"

namespace cpattn {
namespace {

constexpr std::size_t kBlockRows = 64;
/// Keys before a block of masked rows are left out in multiples of this, where the kernels' blocks
/// of keys begin, so that the bits of a row do not depend on the rows that share its block.
constexpr int64_t kBlockKeys = 1024;

/// Keys of a share that a mask shows.
class MaskedKeys {
 public:
  MaskedKeys(const KeyShare& share, const RowMask& mask)
      : lens_(share.keys().pages().kv_lens), mask_(mask), position_(share.local_keys().position) {
    const std::size_t bs = lens_.size();
    check_call(
        mask.first_byte.size() == bs && mask.row_bits.size() == bs &&
            mask.first_position.size() == bs,
        "mask must be of ", bs, " requests"
    );
    int64_t begin = 0;
    for (std::size_t i = 0; i < bs; ++i) {
      begin_.push_back(begin);
      begin += share.count(static_cast<int64_t>(i));
    }
  }

  /// Sets the bits, from `begin` on, of the keys that the row sees.
  void show(const SeenRow& row, std::span<uint8_t> bits, int64_t begin) const {
    const int64_t token = row.position - mask_.first_position[row.request];
    const int64_t first_bit = token * mask_.row_bits[row.request];
    const int64_t first_byte = mask_.first_byte[row.request];
    check_call(
        token >= 0 && lens_[row.request] <= mask_.row_bits[row.request] && first_byte >= 0 &&
            first_byte + (first_bit + lens_[row.request] + 7) / 8 <=
                static_cast<int64_t>(mask_.bits.size()),
        "mask must have a row for position ", row.position, " of request ", row.request
    );
    const uint8_t* flags = mask_.bits.data() + first_byte;
    const int64_t* positions = position_.data() + begin_[row.request];
    for (int64_t key = row.first; key < row.last; ++key) {
      const int64_t flag = first_bit + positions[key], bit = begin + (key - row.first);
      const int shown = flags[flag / 8] >> flag % 8 & 1;
      bits[bit / 8] |= static_cast<uint8_t>(shown << bit % 8);
    }
  }

 private:
  const std::vector<int64_t>& lens_;
  const RowMask& mask_;
  std::vector<int64_t> position_, begin_;
};

}  // namespace

SequenceCall masked_call(
    const KeyShare& share,
    const LocalPages& pages,
    const std::vector<SeenRow>& rows,
    const RowMask& mask
) {
  const int64_t step = std::lcm(kBlockKeys, pages.page_size);
  const MaskedKeys masked(share, mask);
  CallBuilder call(pages);
  std::vector<uint8_t> bits;
  for (std::size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
    const int64_t request = rows[begin].request;
    // The first and last keys of a request's rows ascend.
    const int64_t low = rows[begin].first - rows[begin].first % step;
    int64_t high = 0;
    for (; end < rows.size() && end < begin + kBlockRows && rows[end].request == request; ++end) {
      high = rows[end].last;
    }
    const std::size_t first_byte = bits.size();
    const auto num_bits = static_cast<int64_t>(end - begin) * (high - low);
    bits.resize(first_byte + (num_bits + 7) / 8);
    const std::span<uint8_t> block = std::span(bits).subspan(first_byte);
    for (std::size_t i = begin; i < end; ++i) {
      const auto row = static_cast<int64_t>(i - begin);
      masked.show(rows[i], block, row * (high - low) + (rows[i].first - low));
      call.add_row(rows[i]);
    }
    call.end_sequence(request, low, high);
  }
  SequenceCall made = call.finish();
  made.mask = std::move(bits);
  return made;
}

}  // namespace cpattn
