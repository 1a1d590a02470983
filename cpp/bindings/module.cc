// SPDX-License-Identifier: Apache-2.0
#include "bindings/module.h"

namespace py = pybind11;

namespace cpattn::bindings {

bool python_signal_pending() {
  const py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

}  // namespace cpattn::bindings

PYBIND11_MODULE(_core, m) {
  namespace bindings = cpattn::bindings;
  m.doc() = "Compiled core of cpattn. Private: import cpattn.";
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const cpattn::Interrupted&) {
      // PyErr_CheckSignals has set KeyboardInterrupt on this thread already.
    }
  });
  bindings::register_attention(m);
  bindings::register_copy_blocks(m);
  bindings::register_cp_attention(m);
  bindings::register_cp_indexer(m);
  bindings::register_fia(m);
  bindings::register_sparse_flash(m);
  bindings::register_sparse_mla(m);
  bindings::register_indexer(m);
  bindings::register_kv_pool(m);
  bindings::register_runtime(m);
  bindings::register_kv_pages(m);
  bindings::register_send_kvcache(m);
  bindings::register_topk(m);
  bindings::register_trace(m);
  bindings::register_transfer_plan(m);
  bindings::register_kv_transfer(m);
  bindings::register_reference(m);
  bindings::register_rows(m);
  bindings::register_context_parallel(m);
  bindings::register_dsa_metadata(m);
}
