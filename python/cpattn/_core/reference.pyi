# Types of the float64 oracle in the compiled core.
# fmt: off

from typing import SupportsFloat

import numpy as np
from numpy.typing import NDArray

from .._types import Flags as _Flags
from .._types import IndexTable, Indices
from .._types import ScoreBias as _ScoreBias
from .._types import Tensor as _Tensor
from .._types import Window as _Window

_Indices = Indices | IndexTable

def paged_attention(
    q: _Tensor, k_cache: _Tensor, v_cache: _Tensor, q_lens: _Indices, kv_lens: _Indices,
    first_positions: _Indices | None, block_tables: _Indices, page_size: int, hnd: bool,
    k_scale: SupportsFloat | _Tensor | None, v_scale: SupportsFloat | _Tensor | None,
    kv_dtype: str | None, scale: float, causal: _Flags, window: _Window, softcap: float,
    score_bias: tuple[_ScoreBias, _Tensor | None, _Tensor | None] | None, sinks: _Tensor | None,
    custom_mask: _Tensor | None, out: NDArray[np.float64], lse: NDArray[np.float64],
) -> None: ...
def flash_mla_sparse_fwd(
    q: _Tensor, kv: _Tensor, indices: _Tensor, *, sm_scale: float, d_v: int,
    attn_sink: _Tensor | None, topk_length: _Indices | None, out: NDArray[np.float64],
    max_logits: NDArray[np.float64], lse: NDArray[np.float64],
) -> None: ...
def merge_state(
    out_a: _Tensor, lse_a: _Tensor, out_b: _Tensor, lse_b: _Tensor, out: NDArray[np.float64],
    lse: NDArray[np.float64],
) -> None: ...
def indexer_logits(
    q: _Tensor, k: _Tensor, weights: _Tensor, ks: _Indices, ke: _Indices, k_scale: _Tensor | None,
    out: NDArray[np.float64],
) -> None: ...
def rms_norm(
    x: _Tensor, weight: _Tensor, bias: _Tensor | None, eps: float, out: NDArray[np.float64],
) -> None: ...
def hadamard_transform(x: _Tensor, scale: float, out: NDArray[np.float64]) -> None: ...
def dequantize_kv_rows(rows: _Tensor, out: NDArray[np.float64]) -> None: ...
