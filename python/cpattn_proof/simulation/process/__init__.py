# SPDX-License-Identifier: Apache-2.0
"""Process that all ranks share: temporary replacements in it, and the private state of each rank.

``torch_names``      private names of torch, and differences between its releases
``process_patches``  replacements in torch and Python while ranks run
``cuda_as_cpu``      calls of CUDA, done by the CPU
``rank_state``       environment, groups, random numbers and modules of each rank
``output``           printed text of ranks
"""
