# SPDX-License-Identifier: Apache-2.0
"""Attention layers of a model during a pass over ranks."""

from __future__ import annotations

from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ....attention import default_scale, plan_attention
from ..contiguous import UNSUPPORTED, check_supported, float_sinks
from ..masks import window_of
from ..mla import absorb, absorb_mla, keeps_latents, project
from .indexed import KIND, Indexers, Selection

NAME = "cpattn_over_ranks"
ENGINE = "ContextParallelModel"


class Pass(Protocol):
    """Attention of one forward pass: writes new keys and values of a layer, then attends."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Return results [rows, num_heads, v_head_dim] of q, k and v [rows, heads, dim]."""


@dataclass(frozen=True)
class LayerShape:
    """Heads and dimensions of a layer's rows in its pool.

    `v_head_dim` is 0 for latents, or the dimension of the index keys beside them.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype


_RUNNING: ContextVar[Pass] = ContextVar(NAME)


def attention_over_ranks(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    indices: Selection | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend for a layer to the keys of all ranks; see `contiguous_attention` for the arguments.

    `indices` is what the layer's indexer returned.
    """
    if (running := _RUNNING.get(None)) is None:
        raise ValueError(f"{NAME}: this attention is for the passes of {ENGINE} alone")
    check_supported(query, key, value, dropout=dropout, options=options, unsupported=UNSUPPORTED)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if (attention_mask is not None and attention_mask.numel()) or not causal:
        raise ValueError(f"{ENGINE}: attention must be causal, without a mask of the layer's own")
    window = window_of(module, sliding_window)
    scale = default_scale(NAME, query.shape[-1]) if scaling is None else scaling
    given: dict[str, Any] = {
        "scale": scale,
        "window": window - 1 if window else None,
        "softcap": float(softcap or 0.0),
        "sinks": float_sinks(s_aux),
    }
    latents = keeps_latents(module)
    if latents:  # key and value are a latent and its rotary part
        query, key = absorb(module, query), torch.cat([key, value], -1)
        given["v_head_dim"] = module.kv_lora_rank
    q, k, values = (x[0].transpose(0, 1) for x in (query, key, value))
    v: Tensor | None = None if latents else values
    if indices is not None:  # its keys have the place of values
        if window or softcap or s_aux is not None or not latents:
            raise ValueError(f"{ENGINE}: an indexer must select latents, without a window or sinks")
        given["selection"], v = indices, indices.k
    out = running.attend(module.layer_idx, q, k, v, given)[None]
    return (project(module, out) if latents else out), None


class RunningModel:
    """Model during passes: its layers call a pass, and no layer makes a mask."""

    def __init__(self, model: Any) -> None:
        self.model = model
        modules: list[Any] = [module for module in model.modules() if hasattr(module, "config")]
        self._configs = list({id(module.config): module.config for module in modules}.values())
        self._indexers = Indexers(model)
        self._has_latents = any(hasattr(type(module), "expand_kv") for module in modules)

    def logits(self, a_pass: Pass, ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        """Run tokens, int64 [rows], at their positions; return logits of the rows `keep`."""
        before = [config._attn_implementation for config in self._configs]
        token = _RUNNING.set(a_pass)
        try:
            for config in self._configs:
                config._attn_implementation = NAME
            with (
                torch.inference_mode(),
                absorb_mla(self.model, NAME) if self._has_latents else nullcontext(),
                self._indexers.selecting_later(),
            ):
                out = self.model(
                    input_ids=ids[None], position_ids=positions[None], use_cache=False,
                    logits_to_keep=keep, **self._indexers.inputs,
                )  # fmt: skip
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation = name
            _RUNNING.reset(token)
        logits: Tensor = out.logits[0]
        if len(logits) != len(keep):
            raise ValueError(f"it returns {len(logits)} rows of logits for {len(keep)} to keep")
        return logits


class _Probe:
    """Pass of one token twice, at one position, that records what layers request."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        if layer in self.shapes:
            raise ValueError(f"layer {layer} attends twice")
        if not (_twice_the_same(q) and _twice_the_same(k)):
            raise ValueError(
                f"layer {layer} does not make each token's query and key from the token and its "
                "position_ids alone"
            )
        self.shapes[layer] = LayerShape(
            k.shape[1], k.shape[2], 0 if v is None else v.shape[2], k.dtype
        )
        self.windows[layer] = options["window"]
        dim = options["v_head_dim"] if "v_head_dim" in options or v is None else v.shape[2]
        plan_attention(  # refuses sizes that are too large
            q_lens=[1], kv_lens=[1], block_tables=[[0]], page_size=1, num_pages=1,
            num_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=k.shape[2], v_head_dim=dim,
        )  # fmt: skip
        return q.new_zeros(*q.shape[:2], dim)


def _twice_the_same(rows: Tensor) -> bool:
    """Return whether there are two rows, equal but for rounding."""
    if len(rows) != 2:
        return False
    first, second = rows.float()
    return not torch.dist(first, second) > 0.01 * first.norm()


def layer_shapes(model: Any) -> dict[int, LayerShape]:
    """Run a token twice through a model; return the shape of the rows that each layer keeps.

    ValueError names a model that cannot run over ranks.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_over_ranks)
    if reason := _refusal(model):
        raise _refused(model, reason)
    probe, text = _Probe(), model.config.get_text_config()
    same = torch.ones(2, dtype=torch.int64)
    # No padding, which some models skip as they count positions.
    ids = torch.full((2,), 0 if getattr(text, "pad_token_id", None) else 1)
    try:
        RunningModel(model).logits(probe, ids, same, same[:1])
    except ValueError as error:
        raise _refused(model, str(error)) from error
    except (KeyError, TypeError) as error:
        reason = f"it fails without masks and caches, by {type(error).__name__}: {error}"
        raise _refused(model, reason) from error
    kinds = getattr(text, "layer_types", None) or [None] * text.num_hidden_layers
    if sorted(probe.shapes) != list(range(text.num_hidden_layers)):
        raise _refused(
            model,
            f"{len(probe.shapes)} of its {text.num_hidden_layers} layers call attention functions",
        )
    for layer, kind in enumerate(kinds):
        if kind == "sliding_attention" and probe.windows[layer] is None:
            raise _refused(model, f"layer {layer} does not say how long its window is")
    return probe.shapes


def _refused(model: Any, reason: str) -> ValueError:
    return ValueError(
        f"{ENGINE}: the model must be a causal one of text whose layers all attend through "
        f"transformers' attention functions, got {type(model).__name__}: {reason}"
    )


def _refusal(model: Any) -> str:
    """Return why a model is refused without a run, or ""."""
    from torch.distributed.tensor import DTensor

    config, text = model.config, model.config.get_text_config()
    if config.is_encoder_decoder:
        return "it is an encoder with a decoder"
    if media := [name for name in config.sub_configs if name not in ("text_config",)]:
        return f"it takes more than text ({', '.join(media)})"
    if model.training:
        return "it is in training mode, call model.eval()"
    if getattr(model, "_tp_size", None) or any(isinstance(p, DTensor) for p in model.parameters()):
        return "its weights are tensor-parallel, and must be whole on each rank"
    if away := {p.device.type for p in model.parameters()} - {"cpu"}:
        return f"its weights must be on the CPU, and are on {', '.join(sorted(away))}"
    kinds = set(getattr(text, "layer_types", None) or ())
    if others := sorted(kinds - {"full_attention", "sliding_attention", KIND}):
        return f"it has layers of {', '.join(others)}"
    if getattr(text, "attention_chunk_size", None):
        return "it attends within chunks"
    if lengths := _rope_types(getattr(text, "rope_parameters", None)) & {"dynamic", "longrope"}:
        return f"its rope ({', '.join(lengths)}) depends on the longest sequence of a batch"
    return ""


def _rope_types(parameters: Any) -> set[str]:
    """Return the types of rope in a config, whose layers may have different ones."""
    if not isinstance(parameters, dict):
        return set()
    found = {parameters["rope_type"]} if "rope_type" in parameters else set()
    return found.union(*(_rope_types(value) for value in parameters.values()))
