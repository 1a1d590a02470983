# SPDX-License-Identifier: Apache-2.0
"""Node tests of the operator `Attention` of ONNX. Its mask is added after softcap, as a bias; rows
begin after the past keys, or at the end of `nonpad_kv_seqlen`, or at key 0."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cpattn.kv import write_pages
from outside import onnx_nodes
from outside.dense import attend
from outside.suite import Case

Array = Any
#: Attributes of the node that `compute` reads or may ignore.
ATTRIBUTES = {
    "is_causal", "kv_num_heads", "left_window_size", "q_num_heads", "qk_matmul_output_mode",
    "right_window_size", "scale", "softcap", "softmax_precision",
}  # fmt: skip


def cases() -> Iterator[Case]:
    yield from onnx_nodes.cases("attention", "Attention", ATTRIBUTES, compute)


def compute(attributes: Mapping[str, Any], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return all outputs of the node except the scores, by their names in ONNX."""
    q = heads_first(inputs["Q"], attributes.get("q_num_heads"))
    k, v = (heads_first(inputs[name], attributes.get("kv_num_heads")) for name in "KV")
    batch, rows = q.shape[0], q.shape[2]
    first, lens = [0] * batch, inputs.get("nonpad_kv_seqlen")
    if "past_key" in inputs:
        first = [inputs["past_key"].shape[2]] * batch
        k, v = appended(inputs["past_key"], k, inputs["past_value"], v)
    elif lens is not None:
        first = [int(n) - rows for n in lens]
    mask = inputs.get("attn_mask")
    if mask is not None and mask.shape[-1] < k.shape[2]:
        # Keys after the end of a mask are hidden.
        fill = False if mask.dtype == bool else -np.inf
        width = [(0, 0)] * (mask.ndim - 1) + [(0, k.shape[2] - mask.shape[-1])]
        mask = np.pad(mask, width, constant_values=fill)
    left, right = (
        None if n < 0 else n
        for n in (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    )
    out = attend(
        q, k, v, first=first, kv_lens=None if lens is None else lens.tolist(), mask=mask,
        left=left, right=0 if attributes.get("is_causal") else right,
        scale=attributes.get("scale"), softcap=attributes.get("softcap", 0.0),
    )  # fmt: skip
    if inputs["Q"].ndim == 3:
        out = out.swapaxes(1, 2).reshape(batch, rows, -1)
    return {"Y": out, "present_key": k, "present_value": v}


def heads_first(x: Array, num_heads: int | None) -> Array:
    """Return [batch, heads, tokens, dim], also from [batch, tokens, heads * dim]."""
    if x.ndim == 4:
        return x
    return x.reshape(*x.shape[:2], num_heads, -1).swapaxes(1, 2)


def appended(past_k: Array, k: Array, past_v: Array, v: Array) -> tuple[Array, Array]:
    """Return pages with the past keys and values of each sequence, then the new ones."""
    batch, _, new, _ = k.shape
    past = past_k.shape[2]
    pages = [np.pad(x, [(0, 0), (0, 0), (0, new), (0, 0)]) for x in (past_k, past_v)]
    slots = [page * (past + new) + past + i for page in range(batch) for i in range(new)]
    k, v = (x.swapaxes(1, 2).reshape(batch * new, *x.shape[1::2]) for x in (k, v))
    write_pages(slots, k, pages[0], v, pages[1], kv_layout="HND")
    return pages[0], pages[1]
