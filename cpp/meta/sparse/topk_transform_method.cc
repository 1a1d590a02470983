// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/topk_transform_method.h"

#include <string>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

enum class Concatenates : uint8_t { never, from_fp8, always };

struct PrefillImpl {
  std::string_view name;
  Concatenates concatenates;
};

constexpr PrefillImpl kPrefillImpls[] = {
    {"aiter", Concatenates::never},
    {"fa3", Concatenates::never},
    {"flashinfer_sparse_mla", Concatenates::never},
    {"flashmla_auto", Concatenates::never},
    {"flashmla_kv", Concatenates::never},
    {"flashmla_sparse", Concatenates::from_fp8},
    {"flashmla_sparse_q8", Concatenates::always},
    {"intel_xpu", Concatenates::never},
    {"tilelang", Concatenates::never},
    {"triton", Concatenates::never},
    {"triton_sparse_mla", Concatenates::from_fp8},
    {"trtllm", Concatenates::never},
};

Concatenates find_prefill_impl(std::string_view name, const char* function) {
  std::string known;
  for (const PrefillImpl& impl : kPrefillImpls) {
    if (impl.name == name) return impl.concatenates;
    known += concat(known.empty() ? "'" : ", '", impl.name, "'");
  }
  check(false, function, ": prefill_impl must be one of ", known, ", got '", name, "'");
  __builtin_unreachable();
}

}  // namespace

std::optional<TopkTransformMethod> parse_topk_transform_method(
    const char* function, std::optional<int64_t> method
) {
  check(
      !method || *method == 1 || *method == 2, function,
      ": method must be TopkTransformMethod.PAGED, RAGGED or None, got ", method.value_or(0)
  );
  if (!method) return std::nullopt;
  return static_cast<TopkTransformMethod>(*method);
}

TopkTransformMethod get_topk_transform_method(
    std::optional<ForwardMode> mode,
    bool fp8_kv_cache,
    std::string_view prefill_impl,
    const char* function
) {
  const Concatenates concatenates = find_prefill_impl(prefill_impl, function);
  const bool from_this_cache = concatenates == Concatenates::always ||
                               (concatenates == Concatenates::from_fp8 && fp8_kv_cache);
  return from_this_cache && mode == ForwardMode::extend ? TopkTransformMethod::ragged
                                                        : TopkTransformMethod::paged;
}

}  // namespace cpattn
