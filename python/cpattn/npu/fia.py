# SPDX-License-Identifier: Apache-2.0
"""The fused inference attention operator of Ascend's torch_npu, on a CPU."""

from __future__ import annotations

from .. import _core
from .._containers import empty
from .._types import IndexTable, Indices, Tensor, TensorT

INT32_MAX = 2147483647


def _refuse(**unsupported: object) -> None:
    for name, value in unsupported.items():
        if value is not None and not (isinstance(value, int) and value == 0):
            raise ValueError(
                f"npu_fused_infer_attention_score: {name} is not supported, leave it at its default"
            )


def npu_fused_infer_attention_score(
    query: TensorT,
    key: Tensor,
    value: Tensor,
    *,
    pse_shift: None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Indices | None = None,
    actual_seq_lengths_kv: Indices | None = None,
    dequant_scale1: None = None,
    quant_scale1: None = None,
    dequant_scale2: None = None,
    quant_scale2: None = None,
    quant_offset2: None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    block_table: IndexTable | None = None,
    query_padding_size: None = None,
    kv_padding_size: None = None,
    key_antiquant_scale: Tensor | None = None,
    key_antiquant_offset: Tensor | None = None,
    value_antiquant_scale: Tensor | None = None,
    value_antiquant_offset: Tensor | None = None,
    key_shared_prefix: None = None,
    value_shared_prefix: None = None,
    actual_shared_prefix_len: None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    key_rope_antiquant_scale: None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = INT32_MAX,
    next_tokens: int = INT32_MAX,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
) -> tuple[TensorT, TensorT]:
    """Compute attention with the signature and the meaning of ``torch_npu``'s operator.

    Results that the NPU leaves undefined are defined here: the LSE is a natural logarithm, rows
    without visible keys give zeros and LSE -inf, and page ids are checked. Sizes that the NPU's
    hardware rejects (head dimensions, head counts, block sizes) work here.

    Parameters
    ----------
    query : tensor, float32, float16 or bfloat16
        Axes as in `input_layout`.
    key, value : tensors, of the dtype of query, or of int8 with scales
        Axes as in `input_layout`, or blocks: [blocks, block_size, H], under BNSD and TND
        layouts also [blocks, N, block_size, D]. `value` may have another D.
    atten_mask : tensor, bool, int8 or uint8, optional
        True hides. Modes 0 and 1: [S1, S2], [B or 1, S1, S2] or [B or 1, 1, S1, S2]; [B, S2] if
        S1 is 1. Larger masks, too, if S1 and S2 are 1: sglang passes the template for prompts of
        one token. Modes 2 to 4: the [2048, 2048] template, whose contents are not read.
    actual_seq_lengths : ints [B] or [1], optional
        Queries of each sequence, or one number for all; default S1. TND layouts require it, as
        running sums of the lengths that end at T.
    actual_seq_lengths_kv : ints [B] or [1], optional
        Keys of each sequence, or one number for all; default S2. Blocks and TND layouts require it;
        TND layouts without blocks take running sums.
    block_table : ints [B, >= ceil(kv_len / block_size)], optional
        Block ids; entries beyond a sequence's own blocks are never read.
    query_rope, key_rope : tensors, of the dtype of query, optional
        More dimensions of query and key (MLA), of the same layout.
    num_heads : int
        Heads of the queries.
    scale : float
        Factor of q . k; the default is 1.0, not 1 / sqrt(D).
    pre_tokens, next_tokens : int
        Number of visible keys before and behind a query's position, in modes 0 and 4.
    input_layout : str
        BSH, BSND, BNSD, BNSD_BSND, BSH_NBSD, BSND_NBSD, BNSD_NBSD, TND, TND_NTD or NTD_TND:
        B batch, S tokens, N heads, D dimension, H = N * D, T tokens of all sequences. The part
        after the underscore is the layout of the output.
    num_key_value_heads : int
        KV heads; 0: as many as `num_heads`.
    sparse_mode : int
        For query i of S1 and key j of S2, both of one sequence::

            0  all; with atten_mask i - pre_tokens <= j <= i + next_tokens, and not masked
            1  not masked
            2  j <= i
            3  j <= i + S2 - S1
            4  i + S2 - S1 - pre_tokens <= j <= i + S2 - S1 + next_tokens

        Modes 1 to 4 need the mask. TND layouts take 0 without and 3 with it.
    inner_precise : int
        0 to 3, without effect: sums are always in float32.
    block_size : int
        Tokens per block; with `block_table`.
    softmax_lse_flag : bool
        Whether to return the log-sum-exp.
    key_antiquant_scale, key_antiquant_offset, value_antiquant_scale, value_antiquant_offset
        Dequantization of int8 `key` and `value`: (code + offset) * scale. Both scales are required;
        both offsets may be missing. TND layouts and rope parts refuse them.
    key_antiquant_mode, value_antiquant_mode : int
        Granularity and shape of scales and offsets; the same for both, or 0 for keys and 1 for
        values::

            0  each channel: [N, 1, D], [N, D] or [H], with 1 before; or everything: [1]
            1  each token: [B, S2 or more], with 1 before
            2  each head: [N]
            3  each head and token: [B, N, S2 or more]
            4  each token in its block: [blocks, block_size]
            5  each head and token in its block: [blocks, N, block_size]

        Numbers of modes 0 and 2 are of the dtype of query, the others float32.
    antiquant_scale, antiquant_offset, antiquant_mode
        Scales, offsets and mode for key and value in one tensor [2, ...], in modes 0 and 1; without
        effect beside `key_antiquant_scale`.
    pse_shift, query_padding_size, kv_padding_size, dequant_scale1, quant_scale1, dequant_scale2, \
quant_scale2, quant_offset2, key_rope_antiquant_scale, key_shared_prefix, value_shared_prefix, \
actual_shared_prefix_len
        Not supported; only the defaults are allowed.

    Returns
    -------
    out : tensor in the output layout
        In the container and dtype of query. Zeros for rows past their sequence's actual length.
    lse : tensor [B, N, S1, 1], or [T, N, 1] under TND layouts, float32
        A single 0, shape [1], without ``softmax_lse_flag``.

    Raises
    ------
    TypeError
        If an argument is of another type than stated, such as a list in place of a tensor.
    ValueError
        If an argument breaks a rule of the list above, or an unsupported one has no default value.

    Notes
    -----
    Reading codes applies a scale without offset of the whole tensor, of heads or of tokens. In
    other cases, and in modes 1 and 3 with blocks, the call first dequantizes the keys and values of
    a sequence to the dtype of query, as the operator is defined. Sequences take turns, so the
    longest sequence bounds the memory.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> query = np.ones((3, 4, 16), np.float32)            # three tokens of one sequence
    >>> blocks = np.ones((2, 8, 4 * 16), np.float32)       # two blocks of eight tokens
    >>> out, _ = cpattn.npu.npu_fused_infer_attention_score(
    ...     query, blocks, blocks, input_layout="TND", num_heads=4, scale=0.25,
    ...     block_table=[[1, 0]], block_size=8,
    ...     actual_seq_lengths=[3], actual_seq_lengths_kv=[10])
    >>> out.shape, float(out[0, 0, 0])
    ((3, 4, 16), 1.0)
    """
    _refuse(
        pse_shift=pse_shift, dequant_scale1=dequant_scale1, quant_scale1=quant_scale1,
        dequant_scale2=dequant_scale2, quant_scale2=quant_scale2, quant_offset2=quant_offset2,
        query_padding_size=query_padding_size, kv_padding_size=kv_padding_size,
        key_shared_prefix=key_shared_prefix, value_shared_prefix=value_shared_prefix,
        actual_shared_prefix_len=actual_shared_prefix_len,
        key_rope_antiquant_scale=key_rope_antiquant_scale,
    )  # fmt: skip
    call = _core.Fia(
        query, key, value, query_rope=query_rope, key_rope=key_rope, atten_mask=atten_mask,
        actual_seq_lengths=actual_seq_lengths, actual_seq_lengths_kv=actual_seq_lengths_kv,
        block_table=block_table, num_heads=num_heads, num_key_value_heads=num_key_value_heads,
        scale=scale, pre_tokens=pre_tokens, next_tokens=next_tokens, input_layout=input_layout,
        sparse_mode=sparse_mode, inner_precise=inner_precise, block_size=block_size,
        softmax_lse_flag=softmax_lse_flag, antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset, key_antiquant_scale=key_antiquant_scale,
        key_antiquant_offset=key_antiquant_offset, value_antiquant_scale=value_antiquant_scale,
        value_antiquant_offset=value_antiquant_offset, antiquant_mode=antiquant_mode,
        key_antiquant_mode=key_antiquant_mode, value_antiquant_mode=value_antiquant_mode,
    )  # fmt: skip
    out = empty("npu_fused_infer_attention_score", query, call.out_shape)
    lse = empty("npu_fused_infer_attention_score", query, call.lse_shape, "float32")
    call.run(out, lse)
    return out, lse
