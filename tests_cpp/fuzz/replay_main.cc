// SPDX-License-Identifier: Apache-2.0
// Runs a fuzzing program on the inputs in files and folders, without a fuzzer: what a compiler
// other than clang can do, and every test run does.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "fuzz/entry.h"

namespace {

namespace fs = std::filesystem;

int run_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    std::exit(2);
  }
  const std::vector<char> text{std::istreambuf_iterator<char>(file), {}};
  // A copy of just this size, so that AddressSanitizer sees reads past it.
  const std::vector<uint8_t> bytes(text.begin(), text.end());
  std::fprintf(stderr, "%s\n", path.c_str());  // the last one is the culprit
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  int num_inputs = 0;
  for (int i = 1; i < argc; ++i) {
    const fs::path path = argv[i];
    if (!fs::is_directory(path)) {
      num_inputs += run_file(path);
      continue;
    }
    for (const auto& entry : fs::directory_iterator(path)) num_inputs += run_file(entry.path());
  }
  std::printf("%d inputs\n", num_inputs);
  return num_inputs > 0 ? 0 : 1;
}
