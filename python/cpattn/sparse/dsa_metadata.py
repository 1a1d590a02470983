# SPDX-License-Identifier: Apache-2.0
"""The integers of a sparse-attention (DSA) batch: which keys each query may select, and where
they are."""

from __future__ import annotations

from .. import _core
from .._core import ContextParallelMetadata
from .._core import DsaMetadata as DsaMetadata
from .._types import Indices
from ..context_parallel.forward_mode import ForwardMode
from .topk import TopkTransformMethod

__all__ = ["DsaMetadata", "build_dsa_metadata"]


def build_dsa_metadata(
    extend_lens: Indices | None,
    seq_lens: Indices,
    *,
    forward_mode: ForwardMode,
    topk: int,
    fp8_kv_cache: bool,
    prefill_impl: str,
    page_size: int = 1,
    req_to_token: Indices | None = None,
    req_pool_indices: Indices | None = None,
    num_draft_tokens: int | None = None,
    cp_metadata: ContextParallelMetadata | None = None,
    num_rows: int | None = None,
) -> DsaMetadata:
    """What indexer, top-k transform and sparse attention need to know of a batch.

    Parameters
    ----------
    extend_lens : ints, shape [bs], or None
        New tokens of each sequence. None: one each in decode, `num_draft_tokens` each in verify
        and draft batches.
    seq_lens : ints, shape [bs]
        Cached prefix plus new tokens in every mode, draft tokens included. Below `extend_lens`
        in verify and draft batches only, where the first rows then see nothing.
    forward_mode : ForwardMode
    topk : int
    fp8_kv_cache, prefill_impl
        As in `get_topk_transform_method`.
    page_size : int
        Of ``real_page_table``.
    req_to_token : ints, shape [requests, slots], optional
        The slot of every token of every request. Without it there are no page tables.
    req_pool_indices : ints, shape [bs], optional
        The rows of `req_to_token` of this batch; default 0, 1, ...
    cp_metadata : ContextParallelMetadata, optional
        Of the same batch: only rows of q on its rank count, and only sequences that have any.
    num_rows : int, optional
        Rows of q with padding; default those of the batch or of `cp_metadata`.

    Returns
    -------
    DsaMetadata
        A printable, comparable value of read-only int32 arrays, for n sequences and T rows of q:

        ``bs_idx, extend_lens, cache_seqlens`` [n]
            Each sequence's index in the batch, rows of q here, and keys.
        ``cu_seqlens_q, cu_seqlens_k`` [n + 1]
            Running sums of these. ``cu_seqlens_q`` is None where rows of a sequence lie apart,
            under zigzag; ``token_to_batch_idx`` serves as `batch_idx_list` then.
        ``seqlens_expanded`` [T]
            Keys that each row sees: ``seq_len - extend_len + 1, ..., seq_len``.
        ``token_to_batch_idx`` [T]
            The sequence of each row, as a position in ``bs_idx``.
        ``ks, ke`` [T]
            The keys of each row where those of all n sequences are concatenated.
        ``topk_indices_offset`` [T]
            ``ks``, if the method is RAGGED; else None.
        ``dsa_cache_seqlens`` [num_rows]
            ``min(seqlens_expanded, topk)``, not below 0, and 0 in padding; running sums in
            ``dsa_cu_seqlens_k``.
        ``page_table_1`` [n, max_seqlen_k], ``real_page_table`` [n, pages]
            Slots, and pages of `page_size`; rows are of sequences in every mode.
        ``page_table_1_flattened`` [sum(cache_seqlens)]
            Slots of the concatenated keys, if the method is RAGGED and they are not just the
            new tokens of the batch; else None.

        Also ``forward_mode``, ``topk_transform_method``, ``topk``, ``page_size``,
        ``max_seqlen_q``, ``max_seqlen_k`` and ``to_dict()``.

    Raises
    ------
    ValueError
        Names the argument, the rule, the value and its position.

    Examples
    --------
    >>> batch = build_dsa_metadata([3, 2], [10, 4], forward_mode=ForwardMode.EXTEND, topk=2048,
    ...                            fp8_kv_cache=True, prefill_impl="flashmla_sparse")
    >>> batch.topk_transform_method.name, batch.ks.tolist(), batch.ke.tolist()
    ('RAGGED', [0, 0, 0, 10, 10], [8, 9, 10, 13, 14])
    """
    return _core.build_dsa_metadata(
        extend_lens, seq_lens, forward_mode, topk, fp8_kv_cache, prefill_impl, page_size,
        req_to_token, req_pool_indices, num_draft_tokens, cp_metadata, num_rows,
    )  # fmt: skip


# Not a subclass, as `KVLayout` is: the core makes these values, and would have to know it.
DsaMetadata.forward_mode = property(  # type: ignore[assignment]
    lambda self: ForwardMode(self._forward_mode), doc="ForwardMode"
)
DsaMetadata.topk_transform_method = property(  # type: ignore[assignment]
    lambda self: TopkTransformMethod(self._topk_transform_method), doc="TopkTransformMethod"
)
DsaMetadata.__module__ = "cpattn.sparse"
