// SPDX-License-Identifier: Apache-2.0
#include "ops/base/kernel_table.h"

#include "cpattn/base/check.h"
#include "cpattn/base/isa.h"

namespace cpattn {

namespace {

/// The two tables of an instruction set.
struct Tables {
  const kernels::KernelTable& attention;
  const kernels::SparseKernelTable& sparse;
};

Tables active_tables() {
  switch (active_isa()) {
#ifdef CPATTN_HAVE_AVX2
    case Isa::avx2:
      return {kernels::table_avx2, kernels::sparse_table_avx2};
#endif
#ifdef CPATTN_HAVE_AVX512
    case Isa::avx512:
      return {kernels::table_avx512, kernels::sparse_table_avx512};
#endif
#ifdef CPATTN_HAVE_AVX512BF16
    case Isa::avx512bf16:
      return {kernels::table_avx512bf16, kernels::sparse_table_avx512bf16};
#endif
#ifdef CPATTN_HAVE_AMXTWIN
    case Isa::amx_twin:
      return {kernels::table_amxtwin, kernels::sparse_table_amxtwin};
#endif
#ifdef CPATTN_HAVE_AMX
    case Isa::amx:
      return {kernels::table_amx, kernels::sparse_table_amx};
#endif
#ifdef CPATTN_HAVE_NEON
    case Isa::neon:
      return {kernels::table_neon, kernels::sparse_table_neon};
#endif
#ifdef CPATTN_HAVE_NEONBF16
    case Isa::neonbf16:
      return {kernels::table_neonbf16, kernels::sparse_table_neonbf16};
#endif
    default:
      return {kernels::table_portable, kernels::sparse_table_portable};
  }
}

}  // namespace

const kernels::KernelTable& active_kernels() { return active_tables().attention; }

const kernels::SparseKernelTable& active_sparse_kernels() { return active_tables().sparse; }

std::optional<kernels::CodeType> code_type(DType dtype) {
  switch (dtype) {
    case DType::float8_e4m3fn:
      return kernels::kFloat8E4M3;
    case DType::float8_e5m2:
      return kernels::kFloat8E5M2;
    case DType::int8:
      return kernels::kInt8;
    default:
      return std::nullopt;
  }
}

kernels::ElementType element_type(const char* function, const char* name, DType dtype) {
  switch (dtype) {
    case DType::float32:
      return kernels::kFloat32;
    case DType::float16:
      return kernels::kFloat16;
    case DType::bfloat16:
      return kernels::kBfloat16;
    default:
      check(false, function, ": ", name, " must be float32, float16 or bfloat16, got ", dtype);
      __builtin_unreachable();
  }
}

}  // namespace cpattn
