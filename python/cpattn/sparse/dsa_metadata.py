# SPDX-License-Identifier: Apache-2.0
"""The integers of a sparse-attention (DSA) batch: selectable keys of each query, and places."""

from __future__ import annotations

from .. import _core
from .._core import ContextParallelMetadata
from .._core import DsaMetadata as DsaMetadata
from .._types import Indices
from ..context_parallel.forward_mode import ForwardMode
from .topk import TopkTransformMethod


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
    """Compute the lengths and tables that indexer, top-k transform and sparse attention need.

    Parameters
    ----------
    extend_lens : ints [bs], or None
        New tokens of each sequence. None: one each in decode, `num_draft_tokens` each in verify
        and draft batches.
    seq_lens : ints [bs]
        Cached prefix plus new tokens in every mode, draft tokens included. May be below
        `extend_lens` only in verify and draft batches, where the first rows then see no key.
    forward_mode : ForwardMode
        Mode of the batch.
    topk : int
        Most keys that a row attends to.
    fp8_kv_cache : bool
        Argument of `get_topk_transform_method`.
    prefill_impl : str
        Argument of `get_topk_transform_method`.
    page_size : int
        Tokens per page of ``real_page_table``.
    req_to_token : ints [requests, slots], optional
        Slot of every token of every request. Without it there are no page tables.
    req_pool_indices : ints [bs], optional
        Rows of `req_to_token` of this batch; default 0, 1, ...
    num_draft_tokens : int, optional
        New tokens of each sequence if `extend_lens` is None, in verify and draft batches.
    cp_metadata : ContextParallelMetadata, optional
        Metadata of the same batch; restricts the result to its rank's rows of q, and to sequences
        with such rows.
    num_rows : int, optional
        Rows of q with padding. Default: the rows of the batch or of `cp_metadata`.

    Returns
    -------
    DsaMetadata
        Printable, comparable value; see its class for the arrays.

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


# No subclass like `KVLayout`: the core makes these values and would have to know the subclass.
DsaMetadata.forward_mode = property(  # type: ignore[assignment]
    lambda self: ForwardMode(self._forward_mode), doc="ForwardMode"
)
DsaMetadata.topk_transform_method = property(  # type: ignore[assignment]
    lambda self: TopkTransformMethod(self._topk_transform_method), doc="TopkTransformMethod"
)
DsaMetadata.__module__ = "cpattn.sparse"
DsaMetadata.__doc__ = """The integers of a sparse-attention (DSA) batch.

`build_dsa_metadata` makes it: a printable, comparable value of read-only int32 arrays, for n
sequences and T rows of q. It can be hashed and pickled, and ``to_dict()`` returns every field by
name, as int, list of int or None.

Attributes
----------
bs_idx, extend_lens, cache_seqlens : array [n], int32
    Index in the batch, rows of q here, and keys of each sequence.
cu_seqlens_q : array [n + 1], int32, or None
    Running sums of ``extend_lens``. None if rows of a sequence lie apart, as under zigzag;
    ``token_to_batch_idx`` then serves as `batch_idx_list`.
cu_seqlens_k : array [n + 1], int32
    Running sums of ``cache_seqlens``.
seqlens_expanded : array [T], int32
    Visible keys of each row: ``seq_len - extend_len + 1, ..., seq_len``.
token_to_batch_idx : array [T], int32
    Sequence of each row, as a position in ``bs_idx``.
ks, ke : array [T], int32
    Range of each row's keys in the concatenated keys of all n sequences.
topk_indices_offset : array [T], int32, or None
    ``ks``, if the method is RAGGED; else None.
dsa_cache_seqlens : array [num_rows], int32
    ``min(seqlens_expanded, topk)``, not below 0, and 0 in padding.
dsa_cu_seqlens_k : array [num_rows + 1], int32, or None
    Running sums of ``dsa_cache_seqlens``. None if they exceed int32.
page_table_1 : array [n, max_seqlen_k], int32, or None
    Slots of the keys, a row per sequence in every mode. Entries after a sequence's keys have no
    meaning. None without `req_to_token`.
real_page_table : array [n, pages], int32, or None
    Pages of ``page_size`` tokens, in the form of ``page_table_1``.
page_table_1_flattened : array [sum(cache_seqlens)], int32, or None
    Slots of the concatenated keys, if the method is RAGGED and some keys are not new tokens of the
    batch.
forward_mode : ForwardMode
topk_transform_method : TopkTransformMethod
topk, page_size : int
    The arguments.
max_seqlen_q, max_seqlen_k : int
    Largest of ``extend_lens`` and of ``cache_seqlens``.

Examples
--------
Two sequences in decode; the second has no third key yet:

>>> batch = build_dsa_metadata(None, [3, 2], forward_mode=ForwardMode.DECODE, topk=2,
...                            fp8_kv_cache=False, prefill_impl="fa3",
...                            req_to_token=[[40, 41, 42], [70, 71, 0]])
>>> batch
DsaMetadata(forward_mode=DECODE, topk_transform_method=PAGED, topk=2, page_size=1, \
extend_lens=[1, 1], cache_seqlens=[3, 2])
>>> batch.page_table_1.tolist(), batch.dsa_cache_seqlens.tolist()
([[40, 41, 42], [70, 71, 0]], [2, 2])
"""
