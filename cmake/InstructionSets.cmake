# SPDX-License-Identifier: Apache-2.0
# cpattn_add_isa(<name> <flags...>): compiles cpp/kernels/isa/dense_<name>.cc and
# sparse_<name>.cc with these flags into the core. Such a file may emit no symbol but
# its kernel table: an inline function compiled for AVX-512 would replace the baseline
# copy of it for the whole program. tests_cpp checks that with nm.
include(CheckCXXCompilerFlag)

set(CPATTN_ISA_TARGETS "")
function(cpattn_add_isa name)
  string(JOIN " " flags ${ARGN})
  string(TOUPPER ${name} upper)
  check_cxx_compiler_flag("${flags}" CPATTN_CXX_HAS_${upper})
  if(NOT CPATTN_CXX_HAS_${upper})
    if(name STREQUAL "portable" OR CPATTN_ALL_ISAS)
      message(FATAL_ERROR "cpattn: the compiler rejects ${flags}")
    endif()
    message(STATUS "cpattn: the compiler lacks ${flags}; ${name} kernels are left out")
    return()
  endif()
  set(target cpattn_isa_${name})
  add_library(${target} OBJECT kernels/isa/dense_${name}.cc kernels/isa/sparse_${name}.cc)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/cpp)
  target_link_libraries(${target} PRIVATE cpattn_options)
  # Kernels are always optimised: unoptimised SIMD code makes debug tests useless. With
  # sanitizers less, as GCC takes three times as long to optimise what these add.
  if(CPATTN_SANITIZE)
    set(optimisation -O1)
  else()
    set(optimisation -O3)
  endif()
  target_compile_options(${target} PRIVATE
    ${ARGN} ${optimisation} -ffp-contract=fast -fno-math-errno)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Before register allocation that pass, the default on Arm, makes accumulators spill.
    target_compile_options(${target} PRIVATE -fno-schedule-insns)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC bug 105593: false positives inside avx512fintrin.h.
    target_compile_options(${target} PRIVATE -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
  target_sources(cpattn_core PRIVATE $<TARGET_OBJECTS:${target}>)
  # Only the files that list the sets: builds with others find the rest in the cache.
  target_compile_definitions(cpattn_core INTERFACE CPATTN_HAVE_${upper})
  set_property(SOURCE base/isa.cc ops/base/kernel_table.cc
               APPEND PROPERTY COMPILE_DEFINITIONS CPATTN_HAVE_${upper})
  set(CPATTN_ISA_TARGETS ${CPATTN_ISA_TARGETS} ${target} PARENT_SCOPE)
endfunction()
