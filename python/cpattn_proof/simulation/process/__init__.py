# SPDX-License-Identifier: Apache-2.0
"""The process that all ranks share: what is replaced in it for a while, and what each has alone.

``torch_names``      private names of torch, and what differs between its releases
``process_patches``  replacements in torch and Python while ranks run
``cuda_as_cpu``      calls of CUDA, done by the CPU
``rank_state``       environment, groups, random numbers and modules of each rank
``output``           what ranks print
"""
