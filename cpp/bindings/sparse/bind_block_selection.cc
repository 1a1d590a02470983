// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/module.h"
#include "cpattn/sparse/block_selection.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

void run_select_blocks(
    py::handle score,
    py::handle lengths,
    py::handle topk,
    py::handle block_size,
    py::handle init_blocks,
    py::handle local_blocks,
    py::handle dcp_rank,
    py::handle dcp_size,
    py::handle out_blocks,
    py::handle out_scores
) {
  const Arguments read("select_blocks");
  const TensorArgument scores = read.tensor(score, "score");
  const std::vector<int64_t> visible = read.ints(lengths, "lengths");
  const TensorArgument blocks = read.output(out_blocks, "blocks");
  const TensorArgument block_scores = read.output(out_scores, "block_scores");
  const BlockSelection selection = {
      .function = read.function(),
      .score = *scores,
      .lengths = visible,
      .topk = read.integer(topk, "topk"),
      .block_size = read.integer(block_size, "block_size"),
      .init_blocks = read.integer(init_blocks, "init_blocks"),
      .local_blocks = read.integer(local_blocks, "local_blocks"),
      .dcp_rank = read.integer(dcp_rank, "dcp_rank"),
      .dcp_size = read.integer(dcp_size, "dcp_size"),
      .blocks = *blocks,
      .block_scores = *block_scores,
  };
  const Computation computation;
  select_blocks(selection);
}

void run_merge_blocks(
    py::handle blocks,
    py::handle block_scores,
    py::handle topk,
    py::handle out_blocks,
    py::handle out_scores
) {
  const Arguments read("merge_blocks");
  const IndexTableArgument given = read.table(blocks, "blocks");
  const TensorArgument scores = read.tensor(block_scores, "block_scores");
  const TensorArgument selected = read.output(out_blocks, "out_blocks");
  const TensorArgument selected_scores = read.output(out_scores, "out_scores");
  const BlockMerge merge = {
      .function = read.function(),
      .blocks = *given,
      .block_scores = *scores,
      .topk = read.integer(topk, "topk"),
      .out_blocks = *selected,
      .out_scores = *selected_scores,
  };
  const Computation computation;
  merge_blocks(merge);
}

}  // namespace

void register_block_selection(py::module_& module) {
  module.def("select_blocks", &run_select_blocks);
  module.def("merge_blocks", &run_merge_blocks);
}

}  // namespace cpattn::bindings
