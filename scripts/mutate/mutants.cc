// SPDX-License-Identifier: Apache-2.0
#include "mutants.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

CpattnMutants* opened() {
  static CpattnMutants none;
  const char* path = getenv("CPATTN_MUTANTS");
  const int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (file < 0) return &none;
  void* memory = mmap(nullptr, sizeof(CpattnMutants), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) abort();
  return static_cast<CpattnMutants*>(memory);
}

}  // namespace

CpattnMutants& cpattn_mutants() {
  static CpattnMutants* const mutants = opened();
  return *mutants;
}
