# SPDX-License-Identifier: Apache-2.0
"""Attention operators of Ascend's torch_npu, for programs that import it on a CPU.

    cpattn.integrations.torch_npu.install()
    import torch_npu
    out, _ = torch_npu.npu_fused_infer_attention_score(query, key, value, input_layout="TND", ...)

`install` adds a module ``torch_npu`` and registers its operators as ``torch.ops.npu``. They have
the schemas of torch_npu, run on CPU tensors, and trace under `torch.compile`.
"""

from __future__ import annotations

from typing import Any

from .._stand_in import StandIn, missing, refuse_to_replace

__all__ = ["install"]


def install() -> StandIn:
    """Let ``import torch_npu`` find the operators here; ``with`` or `remove` ends it.

    The operators stay in ``torch.ops.npu``: torch keeps them, and graphs may contain them.

    Raises
    ------
    ImportError
        If torch_npu can be imported, or another package has registered these operators.

    Examples
    --------
    >>> from cpattn.integrations import torch_npu
    >>> with torch_npu.install():  # doctest: +SKIP
    ...     import sglang
    """
    refuse_to_replace("torch_npu")  # before the operators are registered
    from .operators import SUPPLIED

    refuse = missing("torch_npu", SUPPLIED)
    names: dict[str, Any] = {**SUPPLIED, "__all__": list(SUPPLIED), "__getattr__": refuse}
    return StandIn("torch_npu", (), names)
