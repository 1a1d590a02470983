# SPDX-License-Identifier: Apache-2.0
"""Masks of transformers, and the few numbers that describe most of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from ..._types import AnyTensor
from .._torch_library import Operators
from .._visibility import Lengths

FUNCTION = "cpattn.integrations.transformers"


@dataclass(frozen=True)
class Band:
    """Keys that the queries of each sequence see: a run of keys, or a diagonal band within it.

    With ``causal``, the last query sees the run up to its end, and each earlier query one key less.
    Without it, all queries see the whole run. A ``window`` (left, right) limits this to keys around
    the last one that the query would see under ``causal``.
    """

    starts: Lengths  # [batch]
    kv_lens: Lengths  # [batch]
    causal: bool
    window: tuple[int, int] | None = None


def band_of(mask: AnyTensor) -> Band | None:
    """Return the band that equals a bool mask [batch, 1, queries, keys] exactly, or None."""
    visible = mask[:, 0].numpy()
    queries, keys = visible.shape[1:]
    count = visible.view(np.uint8).sum(2, dtype=np.int64)
    begin = visible.argmax(2)
    seen = count > 0
    if np.any(seen & (keys - visible[:, :, ::-1].argmax(2) - begin != count)):
        return None  # some query sees keys with a gap
    stop = (begin + count).max(1)
    start = np.where(seen, begin, stop[:, None]).min(1)
    # The query with most keys fills the window, if there is one.
    window = int(count.max(initial=1)) - 1
    diagonal = stop[:, None] - queries + 1 + np.arange(queries)
    first = np.maximum(start[:, None], diagonal - 1 - window)
    if np.array_equal(count, np.maximum(diagonal - first, 0)) and np.all((begin == first)[seen]):
        windowed = bool(np.any(begin > start[:, None], where=seen))
        return Band(start, stop - start, True, (window, 0) if windowed else None)
    if np.all(count == (stop - start)[:, None]):
        return Band(start, stop - start, False)
    own, last = diagonal - 1, begin + count - 1
    left, right = (int(np.max(side, where=seen, initial=0)) for side in (own - begin, last - own))
    first, end = np.maximum(start[:, None], own - left), np.minimum(stop[:, None], own + right + 1)
    if np.array_equal(count, np.maximum(end - first, 0)) and np.all((begin == first)[seen]):
        return Band(start, stop - start, False, (left, right))
    return None


def bands_of(mask: AnyTensor) -> AnyTensor:
    """Return the `Band` of a bool mask as a tensor for graphs.

    int64 [batch, 5]: start and number of keys of each sequence; 1 if causal, 0 if not, -1 if the
    mask is no band; and the sides of the window, or -1.
    """
    band = band_of(mask)
    bands = torch.full((len(mask), 5), -1)
    if band is not None:
        bands[:, 0], bands[:, 1] = torch.from_numpy(band.starts), torch.from_numpy(band.kv_lens)
        bands[:, 2] = int(band.causal)
        bands[:, 3], bands[:, 4] = band.window or (-1, -1)
    return bands


def band_of_bands(bands: AnyTensor) -> Band | None:
    """Return the `Band` of a mask from the tensor of `bands_of`, or None if it is no band."""
    numbers = bands.numpy()
    causal, left, right = numbers[0, 2:].tolist()
    if causal < 0:
        return None
    window = None if left < 0 else (left, right)
    return Band(numbers[:, 0].copy(), numbers[:, 1].copy(), bool(causal), window)


_operators = Operators("cpattn_transformers")
_operators.define(
    "bands_of(Tensor mask) -> Tensor",
    bands_of,
    lambda mask: mask.new_empty((mask.shape[0], 5), dtype=torch.int64),
)


def visibility_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: AnyTensor | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> AnyTensor | None:
    """Mask function of transformers: the mask of ``sdpa`` with its `Band`, or None.

    None means that query i sees keys up to i + kv_length - q_length; this also covers chunks of
    prompts, for which ``sdpa`` makes masks. Models that support ``eager`` but not ``sdpa`` get
    float masks as in ``eager``, also with a band: DeepSeek-V4 appends columns of 0 and -inf to
    them, which makes a new mask.

    Parameters
    ----------
    attention_mask : bool tensor, shape [batch, >= kv_offset + kv_length], optional
        False where a token is padding.
    q_offset, kv_offset : int
        Positions of the first query and of the first key.
    config : PreTrainedConfig, optional
        Configuration of the model; a model with its own attention is refused.

    Returns
    -------
    bool tensor, shape [batch, 1, q_length, kv_length], or None; a float one as in ``eager``
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    # Compilers cannot follow the search of all models, so they get the answers as constants.
    if refusal := _refusal(config.__class__):
        raise ValueError(refusal)
    if mask_function is None:
        mask_function = causal_mask_function
    end = kv_offset + kv_length
    # Gemma's layers that are not causal would take None as permission to see all keys.
    means_causal = not getattr(config, "use_bidirectional_attention", False)
    if (
        allow_is_causal_skip
        and means_causal
        and mask_function is causal_mask_function
        and not _is_traced(q_offset)
        and end == int(q_offset) + q_length
        and (attention_mask is None or _all_tokens(attention_mask, kv_offset, end))
    ):
        return None
    mask: Any = sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        allow_is_causal_skip=False, **kwargs,
    )  # fmt: skip
    if mask is not None:
        bands = torch.ops.cpattn_transformers.bands_of(mask)
        if _is_eager_only(config.__class__):
            dtype = kwargs.get("dtype", torch.float32)
            mask = torch.where(mask, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)
        # transformers makes a mask for each forward pass, and all layers of a kind share it.
        mask.cpattn_bands = bands
        if not torch.compiler.is_compiling():
            mask.cpattn_band = band_of_bands(mask.cpattn_bands)
    return mask


def window_of(module: Any, said: int | None) -> int | None:
    """Return the sliding window of a layer: the said one, else that of its config.

    Layers of PhiMoE and Qwen2-MoE do not say it: their masks have it, where there are masks.
    """
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if said is not None or not (kinds is None or kinds[module.layer_idx] == "sliding_attention"):
        return said
    window: int | None = getattr(config, "sliding_window", None) or None
    return window


def _is_traced(x: Any) -> bool:
    """Tell whether a number is known only when a graph runs."""
    return isinstance(x, torch.Tensor) and torch.compiler.is_compiling()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refusal(config_class: Any) -> str:
    """Return why models of this configuration are refused, or ""."""
    try:
        for model_class in _model_classes(config_class):
            check_model(model_class)
    except ValueError as error:
        return str(error)
    return ""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_eager_only(config_class: Any) -> bool:
    models = _model_classes(config_class)
    return bool(models) and not any(model_class._supports_sdpa for model_class in models)


@cache
def _model_classes(config_class: Any) -> tuple[Any, ...]:
    from transformers import MODEL_MAPPING

    found = MODEL_MAPPING.get(config_class, ())
    return found if isinstance(found, tuple) else (found,)


def check_model(model_class: Any) -> None:
    """Raise ValueError for models that accept any attn_implementation but compute their own.

    Some of them use its masks nevertheless, and would see keys that these masks hide.
    """
    if not (model_class._supports_sdpa or model_class._supports_attention_backend):
        raise ValueError(
            f"{FUNCTION}: the model must support attention functions or sdpa, "
            f"use attn_implementation='eager' for {model_class.__name__}"
        )


def _all_tokens(attention_mask: AnyTensor, begin: int, end: int) -> bool:
    if torch.compiler.is_compiling():
        return False  # not known yet
    tokens = attention_mask[:, begin:end]
    return tokens.shape[1] == end - begin and bool(tokens.all())


def lowest(dtype: torch.dtype) -> float:
    """Return the number at and below which an element of a float mask hides a key.

    It is half the lowest finite number, which transformers writes, perhaps plus another number.
    """
    return torch.finfo(dtype).min / 2


def check_shape(name: str, x: AnyTensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless x has this shape; all axes but the last may have length 1."""
    if (
        x.ndim != 4
        or x.shape[3] != shape[3]
        or any(n not in (1, size) for n, size in zip(x.shape, shape, strict=True))
    ):
        raise ValueError(f"{FUNCTION}: {name} must have shape {list(shape)}, got {list(x.shape)}")


def check_bias(name: str, x: AnyTensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless x can be added to scores of this shape."""
    check_shape(name, x, shape)
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"{FUNCTION}: {name} must be float32, float16 or bfloat16 to be added to scores, got "
            f"{x.dtype}"
        )


def visible_keys(mask: AnyTensor, shape: tuple[int, int, int, int]) -> AnyTensor | None:
    """Return a bool mask [batch, heads, queries, keys] of visible keys, or None for a bias.

    Numbers are a mask if they are 0 for visible keys and the lowest number for others. A float mask
    with several heads always counts as a bias.
    """
    if not mask.is_floating_point():
        check_shape("attention_mask", mask, (shape[0], 1, *shape[2:]))
        if mask.dtype != torch.bool:
            raise ValueError(
                f"{FUNCTION}: attention_mask must be bool or a float, got {mask.dtype}"
            )
        return mask
    check_shape("attention_mask", mask, shape)
    if mask.shape[1] > 1:
        return None
    visible = mask == 0
    return visible if torch.all(visible | (mask <= lowest(mask.dtype))) else None


def as_bool(mask: AnyTensor, shape: tuple[int, int, int]) -> AnyTensor:
    """Return any mask as bool [batch, queries, keys]; ValueError for a bias."""
    batch, queries, keys = shape
    visible = visible_keys(mask, (batch, 1, queries, keys))
    if visible is None:
        raise ValueError(
            f"{FUNCTION}: attention_mask must be bool, or a float that is 0 for a visible key and "
            "the lowest number for others: sparse attention has no bias"
        )
    return visible[:, 0].expand(shape)


def visibility(
    mask: AnyTensor | None,
    bands: AnyTensor | None,
    shape: tuple[int, int, int, int],
    *,
    causal: bool,
    window: int | None,
) -> tuple[Band, AnyTensor | None, AnyTensor | None]:
    """Return the keys that queries see: a band and, if needed, a flat mask, or a bias.

    `causal` and `window` apply only without a mask; a mask alone decides, by its `bands_of` if
    given. The flat mask is [batch, queries, keys].
    """
    batch, _heads, queries, keys = shape
    starts, kv_lens = np.zeros(batch, np.int64), np.full(batch, keys)
    if mask is None:
        return Band(starts, kv_lens, causal, None if window is None else (window, 0)), None, None
    if mask.shape == (batch, 1, queries, keys):
        found: Any = getattr(mask, "cpattn_band", None) if bands is None else band_of_bands(bands)
        if found is not None:
            return found, None, None
    everything = Band(starts, kv_lens, False)
    visible = visible_keys(mask, shape)
    if visible is None:
        check_bias("attention_mask", mask, shape)
        return everything, None, mask
    return everything, visible[:, 0].expand(batch, queries, keys).flatten(), None
