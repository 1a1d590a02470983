# SPDX-License-Identifier: Apache-2.0
"""Operators of Ascend NPUs on the CPU, with their names, layouts and arguments.

``fia``                     fused inference attention: `npu_fused_infer_attention_score`
``lightning_indexer``       selection of keys for each query: `npu_lightning_indexer`
``sparse_flash_attention``  attention to selected keys: `npu_sparse_flash_attention`

Imports NumPy and the core. `cpattn.integrations.torch_npu` installs them as torch_npu.
"""

from .fia import npu_fused_infer_attention_score
from .lightning_indexer import npu_lightning_indexer
from .sparse_flash_attention import npu_sparse_flash_attention

__all__ = [
    "npu_fused_infer_attention_score",
    "npu_lightning_indexer",
    "npu_sparse_flash_attention",
]
