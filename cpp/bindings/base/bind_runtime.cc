// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <string>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/module.h"
#include "cpattn/base/cpu.h"
#include "cpattn/base/isa.h"
#include "cpattn/base/parallel.h"
#include "cpattn/base/peak.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {

namespace {

py::tuple names_of(const std::vector<Isa>& isas) {
  py::tuple names(isas.size());
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = std::string(isa_name(isas[i]));
  return names;
}

}  // namespace

void register_runtime(py::module_& module) {
  module.attr("__version__") = CPATTN_VERSION;
  module.attr("__compiler__") = CPATTN_COMPILER;
  module.def(
      "active_isa", [] { return std::string(isa_name(active_isa())); },
      R"(Name the kernels that calls use: the best of this machine, or CPATTN_ISA.

Returns
-------
str
    One of `supported_isas`.

Examples
--------
>>> import cpattn
>>> cpattn.active_isa() in cpattn.supported_isas()
True)"
  );
  module.def(
      "supported_isas", [] { return names_of(supported_isas()); },
      R"(List the kernels that this build and this machine have, the plainest first.

Returns
-------
tuple of str
    Names for CPATTN_ISA.

Examples
--------
>>> import cpattn
>>> cpattn.supported_isas()[0]
'portable')"
  );
  module.def("compiled_isas", [] { return names_of(compiled_isas()); });
  module.def("set_isa", [](const std::string& name) { set_isa(name); }, "name"_a);
  module.def("amx_usable", &amx_usable);
  module.def("amx_palette_missing", &amx_palette_missing);
  module.def("has_avx512_fp16", &has_avx512_fp16);
  module.def(
      "measure_peak",
      [](const std::string& dtype, int num_threads) {
        const GilRelease nogil;
        return measure_peak(dtype, num_threads);
      },
      "dtype"_a, "num_threads"_a
  );
  module.def(
      "measure_read_bandwidth", &measure_read_bandwidth, py::call_guard<GilRelease>(),
      "num_threads"_a
  );
  module.def(
      "set_openmp",
      [](std::uintptr_t address) { set_openmp(reinterpret_cast<GompParallel>(address)); },
      "address"_a
  );
  module.def("uses_openmp", [] { return openmp() != nullptr; });
  module.def("default_num_threads", &default_num_threads);
  module.def(
      "exchange_thread_default",
      [](py::handle num_threads) {
        const Arguments read("num_threads");
        const auto number = num_threads.is_none() ? 0 : read.integer<int32_t>(num_threads, "n");
        check(num_threads.is_none() || number >= 1, read.name("n"), " must be >= 1, got ", number);
        const int before = exchange_thread_default(number);
        return before == 0 ? py::object(py::none()) : py::object(py::int_(before));
      },
      "num_threads"_a
  );
  module.def(
      "set_num_threads",
      [](py::handle num_threads) {
        const Arguments read("set_num_threads");
        set_num_threads(read.integer<int32_t>(num_threads, "num_threads"));
      },
      "num_threads"_a, R"(Set how many threads a call uses that does not say, in the whole process.

`cpattn.num_threads` does it for one thread and within a block. Results do not depend on it.

Parameters
----------
num_threads : int
    At least 1, the caller's thread among them.

Returns
-------
None

Raises
------
TypeError, ValueError
    For what is no integer, or below 1.

Examples
--------
>>> import cpattn
>>> cpattn.set_num_threads(0)
Traceback (most recent call last):
    ...
ValueError: set_num_threads: num_threads must be >= 1, got 0)"
  );
}

}  // namespace cpattn::bindings
