// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/gil.h"

namespace cpattn::bindings {

void register_arguments(pybind11::module_& module);
void register_batch_pages(pybind11::module_& module);
void register_key_share(pybind11::module_& module);
void register_attention(pybind11::module_& module);
void register_attention_plan(pybind11::module_& module);
void register_block_selection(pybind11::module_& module);
void register_copy_blocks(pybind11::module_& module);
void register_cp_attention(pybind11::module_& module);
void register_cp_indexer(pybind11::module_& module);
void register_cp_sparse_mla(pybind11::module_& module);
void register_dsa_metadata(pybind11::module_& module);
void register_fia(pybind11::module_& module);
void register_lightning_indexer(pybind11::module_& module);
void register_sparse_flash(pybind11::module_& module);
void register_sparse_mla(pybind11::module_& module);
void register_host_barrier(pybind11::module_& module);
void register_indexer(pybind11::module_& module);
void register_kv_pool(pybind11::module_& module);
void register_exchanges(pybind11::module_& module);
void register_halo(pybind11::module_& module);
void register_pcp_layout(pybind11::module_& module);
void register_page_rows(pybind11::module_& module);
void register_placement(pybind11::module_& module);
void register_shard_gather(pybind11::module_& module);
void register_striped_allocator(pybind11::module_& module);
void register_units(pybind11::module_& module);
void register_kv_transfer(pybind11::module_& module);
void register_runtime(pybind11::module_& module);
void register_kv_digest(pybind11::module_& module);
void register_kv_pages(pybind11::module_& module);
void register_kv_shards(pybind11::module_& module);
void register_send_kvcache(pybind11::module_& module);
void register_topk(pybind11::module_& module);
void register_rows(pybind11::module_& module);
void register_trace(pybind11::module_& module);
void register_transfer_plan(pybind11::module_& module);
void register_reference(pybind11::module_& module);
void register_context_parallel(pybind11::module_& module);
void register_context_parallel_metadata(pybind11::module_& module);

}  // namespace cpattn::bindings
