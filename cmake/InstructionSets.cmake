# SPDX-License-Identifier: Apache-2.0
# cpattn_add_isa(<name> <flags...>): compiles cpp/kernels/isa/dense_<name>.cc and
# sparse_<name>.cc with these flags into the core. Such a file may emit no symbol but
# its kernel table: an inline function compiled for AVX-512 would replace the baseline
# copy of it for the whole program. tests_cpp checks that with nm.
#
# CPATTN_ISAS says which: `all`; `here`, those that this machine can run; `best`, those that it is
# fastest with, and the portable ones.
include(CheckCXXCompilerFlag)

set(CPATTN_ISA_TARGETS "")

# cpattn_find_isas(<variable>): the names of the instruction sets of a build with all of them that
# this machine can run. Such a build would choose the last one.
function(cpattn_find_isas variable)
  set(sets AVX2 AVX512 AVX512BF16 AMX AMXTWIN)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
    set(sets NEON NEONBF16)
  endif()
  list(TRANSFORM sets PREPEND "-DCPATTN_HAVE_")
  try_run(exit_code compiles
    SOURCES ${PROJECT_SOURCE_DIR}/cmake/isas_here.cc ${PROJECT_SOURCE_DIR}/cpp/base/isa.cc
            ${PROJECT_SOURCE_DIR}/cpp/base/cpu.cc ${PROJECT_SOURCE_DIR}/cpp/base/system_linux.cc
    COMPILE_DEFINITIONS ${sets}
    CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${PROJECT_SOURCE_DIR}/cpp;${PROJECT_SOURCE_DIR}/cpp/include"
    RUN_OUTPUT_VARIABLE found
    COMPILE_OUTPUT_VARIABLE output)
  if(NOT compiles OR NOT exit_code EQUAL 0)
    message(FATAL_ERROR "cpattn: CPATTN_ISAS=${CPATTN_ISAS} cannot ask this machine for its instruction sets; "
                        "use CPATTN_ISAS=all\n${output}${found}")
  endif()
  string(REPLACE "-" "" found "${found}")
  set(${variable} ${found} PARENT_SCOPE)
endfunction()

set(CPATTN_ISAS_HERE "")
if(CPATTN_ISAS MATCHES "^(here|best)$")
  cpattn_find_isas(CPATTN_ISAS_HERE)
  if(CPATTN_ISAS STREQUAL "best")
    list(GET CPATTN_ISAS_HERE -1 best)
    set(CPATTN_ISAS_HERE portable ${best})
  endif()
  list(JOIN CPATTN_ISAS_HERE ", " names)
  message(STATUS "cpattn: kernels for ${names} alone (CPATTN_ISAS=${CPATTN_ISAS})")
elseif(NOT CPATTN_ISAS STREQUAL "all")
  message(FATAL_ERROR "cpattn: CPATTN_ISAS must be all, here or best, got '${CPATTN_ISAS}'")
endif()

function(cpattn_add_isa name)
  if(NOT CPATTN_ISAS STREQUAL "all" AND NOT name IN_LIST CPATTN_ISAS_HERE)
    return()
  endif()
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
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/cpp ${PROJECT_SOURCE_DIR}/cpp/include)
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
  # Only the files that list the sets need to know: with others the rest is compiled already.
  set_property(SOURCE base/isa.cc ops/base/kernel_table.cc
               APPEND PROPERTY COMPILE_DEFINITIONS CPATTN_HAVE_${upper})
  set(CPATTN_ISA_TARGETS ${CPATTN_ISA_TARGETS} ${target} PARENT_SCOPE)
endfunction()
