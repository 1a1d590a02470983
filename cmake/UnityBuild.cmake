# SPDX-License-Identifier: Apache-2.0
# cpattn_add_unit(<target> <unit> <sources...>): adds sources that are compiled as one
# translation unit, where reading headers and compiling what every file needs of them takes
# longer than the rest: pybind11, GoogleTest. -DCPATTN_UNITY_BUILD=OFF compiles each alone.
function(cpattn_add_unit target unit)
  target_sources(${target} PRIVATE ${ARGN})
  set_source_files_properties(${ARGN} PROPERTIES UNITY_GROUP ${unit})
  set_target_properties(${target} PROPERTIES
    UNITY_BUILD ${CPATTN_UNITY_BUILD} UNITY_BUILD_MODE GROUP UNITY_BUILD_RELOCATABLE ON)
endfunction()
