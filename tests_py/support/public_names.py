# SPDX-License-Identifier: Apache-2.0
"""Names that users import from `cpattn` and from the sub-packages with operations."""

from typing import Any

import cpattn

PUBLIC_MODULES = (
    cpattn,
    cpattn.context_parallel.halo,
    cpattn.context_parallel.vllm_0_32,
    cpattn.sparse,
    cpattn.sparse.sglang_0_5_23,
    cpattn.npu,
    cpattn.kv,
    cpattn.transfer,
    cpattn.transfer.sglang_0_5_23,
    cpattn.profiling,
)
PUBLIC: dict[str, Any] = {
    name: getattr(module, name) for module in PUBLIC_MODULES for name in module.__all__
}
