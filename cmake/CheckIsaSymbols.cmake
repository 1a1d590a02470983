# SPDX-License-Identifier: Apache-2.0
# Fails when an object built with special -m flags defines a weak symbol or any
# global besides its kernel table (sanitizers add DW.ref.* and __odr_asan.*).
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} --defined-only --extern-only --demangle ${object}
                  OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "\n" ";" symbols "${symbols}")
  foreach(line IN LISTS symbols)
    if(line AND NOT line MATCHES " [RDB] cpattn::kernels::(sparse_)?table_[a-z0-9]+$| DW\\.ref\\.| __odr_asan")
      message(SEND_ERROR "${object} exports: ${line}")
    endif()
  endforeach()
endforeach()
