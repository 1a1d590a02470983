// SPDX-License-Identifier: Apache-2.0
#include <pybind11/operators.h>

#include "bindings/int_arrays.h"
#include "bindings/module.h"
#include "cpattn/transfer_plan.h"

namespace py = pybind11;

namespace cpattn::bindings {

void register_transfer_plan(py::module_& module) {
  py::class_<TransferPlan>(module, "TransferPlan")
      .def_property_readonly(
          "src_addrs",
          [](const py::object& self) {
            return int_view(self.cast<const TransferPlan&>().src_addrs(), self);
          }
      )
      .def_property_readonly(
          "dst_addrs",
          [](const py::object& self) {
            return int_view(self.cast<const TransferPlan&>().dst_addrs(), self);
          }
      )
      .def_property_readonly(
          "lengths",
          [](const py::object& self) {
            return int_view(self.cast<const TransferPlan&>().lengths(), self);
          }
      )
      .def_property_readonly("total_bytes", &TransferPlan::total_bytes)
      .def("__len__", &TransferPlan::num_blocks)
      .def(py::self == py::self);
}

}  // namespace cpattn::bindings
