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
    """Compute what indexer, top-k transform and sparse attention need to know of a batch.

    Parameters
    ----------
    extend_lens : ints [bs], or None
        New tokens of each sequence. None: one each in decode, `num_draft_tokens` each in verify
        and draft batches.
    seq_lens : ints [bs]
        Cached prefix plus new tokens in every mode, draft tokens included. Below `extend_lens`
        in verify and draft batches only, where the first rows then see nothing.
    forward_mode : ForwardMode
        Kind of the batch.
    topk : int
        Keys that a row attends to at most.
    fp8_kv_cache : bool
        The argument of `get_topk_transform_method`.
    prefill_impl : str
        The argument of `get_topk_transform_method`.
    page_size : int
        Tokens of a page of ``real_page_table``.
    req_to_token : ints [requests, slots], optional
        The slot of every token of every request. Without it there are no page tables.
    req_pool_indices : ints [bs], optional
        The rows of `req_to_token` of this batch; default 0, 1, ...
    num_draft_tokens : int, optional
        New tokens of each sequence where `extend_lens` is None, in verify and draft batches.
    cp_metadata : ContextParallelMetadata, optional
        Metadata of the same batch: only rows of q on its rank count, and sequences that have any.
    num_rows : int, optional
        Rows of q with padding; default those of the batch or of `cp_metadata`.

    Returns
    -------
    DsaMetadata
        A printable, comparable value; see there for its arrays.

    Raises
    ------
    TypeError
        If an argument is of another type than stated, such as a float among the lengths.
    ValueError
        If lengths contradict each other or the mode, a slot does not exist, or a size is out of
        range. The message names the argument, the rule, the value and its position.

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
DsaMetadata.__doc__ = """The integers of a sparse-attention (DSA) batch.

A printable, comparable value of read-only int32 arrays, for n sequences and T rows of q, that
`build_dsa_metadata` makes. It can be hashed and pickled, and ``to_dict()`` has every field by
name, as int, list of int or None.

Attributes
----------
bs_idx, extend_lens, cache_seqlens : array [n], int32
    Each sequence's index in the batch, rows of q here, and keys.
cu_seqlens_q : array [n + 1], int32, or None
    Running sums of ``extend_lens``. None where rows of a sequence lie apart, under zigzag;
    ``token_to_batch_idx`` serves as `batch_idx_list` then.
cu_seqlens_k : array [n + 1], int32
    Running sums of ``cache_seqlens``.
seqlens_expanded : array [T], int32
    Keys that each row sees: ``seq_len - extend_len + 1, ..., seq_len``.
token_to_batch_idx : array [T], int32
    The sequence of each row, as a position in ``bs_idx``.
ks, ke : array [T], int32
    The keys of each row where those of all n sequences are concatenated.
topk_indices_offset : array [T], int32, or None
    ``ks``, if the method is RAGGED; else None.
dsa_cache_seqlens : array [num_rows], int32
    ``min(seqlens_expanded, topk)``, not below 0, and 0 in padding.
dsa_cu_seqlens_k : array [num_rows + 1], int32, or None
    Running sums of these. None if they leave int32.
page_table_1 : array [n, max_seqlen_k], int32, or None
    Slots of the keys; rows are of sequences in every mode. Entries behind a sequence's keys say
    nothing. None without `req_to_token`.
real_page_table : array [n, pages], int32, or None
    Pages of ``page_size`` tokens, likewise.
page_table_1_flattened : array [sum(cache_seqlens)], int32, or None
    Slots of the concatenated keys, if the method is RAGGED and they are not just the new
    tokens of the batch.
forward_mode : ForwardMode
topk_transform_method : TopkTransformMethod
topk, page_size : int
    The arguments.
max_seqlen_q, max_seqlen_k : int
    The largest of ``extend_lens`` and of ``cache_seqlens``.

Examples
--------
Two sequences in decode, whose second has no third key yet:

>>> batch = build_dsa_metadata(None, [3, 2], forward_mode=ForwardMode.DECODE, topk=2,
...                            fp8_kv_cache=False, prefill_impl="fa3",
...                            req_to_token=[[40, 41, 42], [70, 71, 0]])
>>> batch
DsaMetadata(forward_mode=DECODE, topk_transform_method=PAGED, topk=2, page_size=1, \
extend_lens=[1, 1], cache_seqlens=[3, 2])
>>> batch.page_table_1.tolist(), batch.dsa_cache_seqlens.tolist()
([[40, 41, 42], [70, 71, 0]], [2, 2])
"""
