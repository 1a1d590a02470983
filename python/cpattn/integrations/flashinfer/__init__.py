# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's paged prefill and decode wrappers and its merge functions, on CPU tensors.

Arguments and their order are FlashInfer's, and so is the log-sum-exp: to base 2, float32, [tokens,
heads], -inf for a row that sees no key. Caches are used in place, with K and V in two tensors or
one. Arguments for GPUs (workspaces, graphs, backends, dtypes to compile for) are accepted without
effect; a ValueError names an unsupported argument that would change the result.

`install` makes ``import flashinfer`` find these names.
"""

from __future__ import annotations

from .._stand_in import StandIn
from ._batch import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from ._merge import merge_state, merge_state_in_place, merge_states

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "install",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]


def install() -> StandIn:
    """Install these names as ``flashinfer`` and its prefill, decode and cascade modules.

    Returns
    -------
    StandIn
        Context manager; its ``remove()`` or the end of a ``with`` removes the modules.

    Raises
    ------
    ImportError
        If a package of that name can be imported.

    Examples
    --------
    >>> from cpattn.integrations import flashinfer
    >>> with flashinfer.install():
    ...     from flashinfer import merge_states
    """
    names = {
        name.__name__: name
        for name in (
            merge_state,
            merge_state_in_place,
            merge_states,
            BatchPrefillWithPagedKVCacheWrapper,
            BatchDecodeWithPagedKVCacheWrapper,
        )
    }
    return StandIn("flashinfer", ["prefill", "decode", "cascade"], names)
