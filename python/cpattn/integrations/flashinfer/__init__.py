# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's paged prefill and decode wrappers and its merging of states, on CPU tensors.

Arguments and their order are FlashInfer's; so is the log-sum-exp: to base 2, float32,
[tokens, heads], -inf for a row that sees no key. Caches are used in place, whether K and V are two
tensors or one. Arguments about graphics processors (workspaces, graphs, backends, dtypes to compile
for) are accepted and have no meaning here; what would change the result and is not supported is
refused with a ValueError that names it.

`install` puts these names where ``import flashinfer`` finds them.
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
    """Put these names where ``flashinfer`` and its prefill, decode and cascade are imported.

    Returns
    -------
    StandIn
        A context manager; its ``remove()`` or the end of a ``with`` takes the modules away.

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
