// SPDX-License-Identifier: Apache-2.0
#include "bindings/module.h"

#include "bindings/bound_class.h"

namespace py = pybind11;

// PyInit__core below looks at the interpreter first: in a sub-interpreter pybind11 would wait
// forever for the GIL of the main interpreter.
// NOLINTNEXTLINE(bugprone-reserved-identifier): the name is what Python looks for.
#define PyInit__core cpattn_init_core

// The module works without the GIL. Caches of the bindings are thread_local, because threads that
// wait for a static variable hold up others, or a mutex guards them while no Python code runs.
// Other objects do not change, except those of one thread (spans, barriers) and those that Python
// guards.
//
// A process may hold two copies of the module, one of them in a folder for the library `kernels`:
// all classes are py::module_local(), because pybind11 refuses a second global class of the same
// C++ type.
PYBIND11_MODULE(_core, m, py::mod_gil_not_used()) {
  namespace bindings = cpattn::bindings;
  m.doc() = "Compiled core of cpattn. Private: import cpattn.";
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const cpattn::Interrupted&) {
      // PyErr_CheckSignals has set KeyboardInterrupt on this thread already.
    }
  });
  bindings::remember_main_thread();
  bindings::register_arguments(m);
  bindings::register_attention_plan(m);
  bindings::register_attention(m);
  bindings::register_block_selection(m);
  bindings::register_copy_blocks(m);
  bindings::register_cp_attention(m);
  bindings::register_cp_indexer(m);
  bindings::register_cp_sparse_mla(m);
  bindings::register_fia(m);
  bindings::register_lightning_indexer(m);
  bindings::register_sparse_flash(m);
  bindings::register_sparse_mla(m);
  bindings::register_host_barrier(m);
  bindings::register_indexer(m);
  bindings::register_kv_pool(m);
  bindings::register_page_rows(m);
  bindings::register_placement(m);
  bindings::register_batch_pages(m);
  bindings::register_key_share(m);
  bindings::register_shard_gather(m);
  bindings::register_striped_allocator(m);
  bindings::register_units(m);
  bindings::register_runtime(m);
  bindings::register_kv_pages(m);
  bindings::register_kv_digest(m);
  bindings::register_kv_shards(m);
  bindings::register_send_kvcache(m);
  bindings::register_topk(m);
  bindings::register_trace(m);
  bindings::register_transfer_plan(m);
  bindings::register_kv_transfer(m);
  bindings::register_reference(m);
  bindings::register_rows(m);
  bindings::register_context_parallel(m);
  bindings::register_exchanges(m);
  bindings::register_halo(m);
  bindings::register_pcp_layout(m);
  bindings::register_dsa_metadata(m);
  bindings::close_classes(m);
}

#undef PyInit__core
// NOLINTNEXTLINE(bugprone-reserved-identifier)
extern "C" PYBIND11_EXPORT PyObject* PyInit__core() {
  if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
    PyErr_SetString(
        PyExc_ImportError, "cpattn works in the main interpreter only, not in a sub-interpreter"
    );
    return nullptr;
  }
  return cpattn_init_core();
}
