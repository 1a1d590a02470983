# SPDX-License-Identifier: Apache-2.0
# Finds Python, pybind11, Eigen and GoogleTest, and refuses old compilers. Nothing is ever downloaded here.

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12)
  message(FATAL_ERROR
    "cpattn needs GCC >= 12 or clang >= 14, ${CMAKE_CXX_COMPILER} is ${CMAKE_CXX_COMPILER_VERSION}. "
    "On Ubuntu 22.04: apt install g++-12, then set CXX=g++-12")
endif()

if(CPATTN_PYTHON)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
  find_package(pybind11 3 CONFIG QUIET)
  if(NOT pybind11_FOUND)  # plain cmake: the interpreter knows where pip put it
    execute_process(
      COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
      OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_package(pybind11 3 CONFIG QUIET)
  endif()
  if(NOT pybind11_FOUND)
    message(FATAL_ERROR "pybind11 >= 3 not found for ${Python_EXECUTABLE}: pip install 'pybind11>=3,<4'")
  endif()
endif()

# The oracle, which Python's face and the tests have, needs Eigen; libcpattn alone needs nothing.
set(CPATTN_REFERENCE OFF)
if(CPATTN_PYTHON OR CPATTN_TESTS)
  set(CPATTN_REFERENCE ON)
endif()

# Eigen 3.4, headers only: CMAKE_PREFIX_PATH, Eigen3_ROOT or the system first,
# then the PyPI package cmeel-eigen in the interpreter's site-packages.
if(CPATTN_REFERENCE)
  find_package(Eigen3 3.4 CONFIG QUIET)
endif()
if(CPATTN_REFERENCE AND NOT TARGET Eigen3::Eigen)
  find_package(Python 3.10 COMPONENTS Interpreter QUIET)
  if(Python_Interpreter_FOUND)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c
        "import importlib.metadata as m; print(m.distribution('cmeel-eigen').locate_file('cmeel.prefix'))"
      OUTPUT_VARIABLE _eigen_prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(_eigen_prefix)
      find_package(Eigen3 3.4 CONFIG QUIET
                   PATHS "${_eigen_prefix}" NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH)
    endif()
  endif()
endif()
if(CPATTN_REFERENCE AND NOT TARGET Eigen3::Eigen)
  message(FATAL_ERROR
    "Eigen 3.4 not found. Any one of these provides it:\n"
    "  apt install libeigen3-dev\n"
    "  pip install cmeel-eigen\n"
    "  cmake -DEigen3_ROOT=<prefix> ...")
endif()

# GoogleTest: an installed package, else the sources that Debian ships with it
# (cross builds need those).
if(CPATTN_TESTS)
  if(NOT CMAKE_CROSSCOMPILING)
    find_package(GTest 1.12 CONFIG QUIET)
  endif()
  if(NOT TARGET GTest::gtest_main)
    find_path(GTEST_SOURCE_DIR googletest/include/gtest/gtest.h
              PATHS /usr/src/googletest NO_CMAKE_FIND_ROOT_PATH)
    if(NOT GTEST_SOURCE_DIR)
      message(FATAL_ERROR
        "GoogleTest 1.12 not found. Any one of these provides it:\n"
        "  apt install libgtest-dev\n"
        "  cmake -DGTEST_SOURCE_DIR=<checkout> ...\n"
        "or leave the C++ tests out: -DCPATTN_TESTS=OFF")
    endif()
    set(INSTALL_GTEST OFF)
    set(BUILD_GMOCK OFF)
    add_subdirectory(${GTEST_SOURCE_DIR} ${PROJECT_BINARY_DIR}/googletest EXCLUDE_FROM_ALL SYSTEM)
    target_compile_options(gtest PRIVATE $<$<CXX_COMPILER_ID:GNU>:-O0>)
    if(NOT TARGET GTest::gtest_main)
      add_library(GTest::gtest_main ALIAS gtest_main)
    endif()
  endif()
endif()
