// SPDX-License-Identifier: Apache-2.0
// What AddressSanitizer is told unless ASAN_OPTIONS says otherwise: short memories of freed blocks
// and of who allocated them, as inputs are small and many; source lines from binutils.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "malloc_context_size=4:quarantine_size_mb=8:allow_addr2line=1";
}
