# SPDX-License-Identifier: Apache-2.0
# A toolchain file: compiles by the clang of the package ziglang for a chosen glibc, as
# scripts/build_wheels.py has it for wheels, for musl, and for macOS on Arm, where nothing is linked:
#   ZIG=<program> cmake --toolchain cmake/zig.cmake -DCPATTN_ZIG_TARGET=x86_64-linux-gnu.2.17 ...
# C++'s library is linked into what it makes.
if(NOT CPATTN_ZIG_TARGET MATCHES "^((x86_64|aarch64)-(linux)-(gnu\\.[0-9.]+|musl)|(aarch64)-(macos))$")
  message(FATAL_ERROR "cmake/zig.cmake: CPATTN_ZIG_TARGET must be x86_64-linux-gnu.<glibc>, "
                      "x86_64-linux-musl, the same for aarch64, or aarch64-macos, "
                      "got '${CPATTN_ZIG_TARGET}'")
endif()
set(_processor ${CMAKE_MATCH_2}${CMAKE_MATCH_5})
if(CMAKE_MATCH_6)
  set(CMAKE_SYSTEM_NAME Darwin)
  set(CMAKE_SYSTEM_PROCESSOR aarch64)
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
elseif(NOT _processor STREQUAL CMAKE_HOST_SYSTEM_PROCESSOR)
  set(CMAKE_SYSTEM_NAME Linux)
  set(CMAKE_SYSTEM_PROCESSOR ${_processor})
endif()
set(CMAKE_CXX_COMPILER ${CMAKE_CURRENT_LIST_DIR}/zig/c++)
set(CMAKE_CXX_COMPILER_TARGET ${CPATTN_ZIG_TARGET})
set(CMAKE_AR ${CMAKE_CURRENT_LIST_DIR}/zig/ar CACHE FILEPATH "")
set(CMAKE_RANLIB ${CMAKE_CURRENT_LIST_DIR}/zig/ranlib CACHE FILEPATH "")
# Stripped by the linker.
set(CMAKE_MODULE_LINKER_FLAGS_INIT -Wl,-s)
# What tells the wrapper's compilers apart for a compiler cache is on the command line.
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES CPATTN_ZIG_TARGET)
# pybind11 tries these, which nothing here asks for; zig would compile C++'s library for each.
set(HAS_FLTO OFF CACHE BOOL "")
set(HAS_FLTO_THIN OFF CACHE BOOL "")
