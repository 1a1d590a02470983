# SPDX-License-Identifier: Apache-2.0
"""What the oracle is given for the layers of ranks with sharded pools."""

from __future__ import annotations

from typing import Any

import torch

from support.distributed import layer_worker as layers
from support.distributed.sharded_worker import coded_inputs

LAYER_NAMES = [*layers.LAYERS, *coded_inputs(), "latents", "latents, rope apart"]


def layer_inputs(name: str) -> dict[str, Any]:
    """The arguments of the oracle for a layer."""
    sizes = {
        "q_lens": layers.EXTENDS,
        "kv_lens": layers.LENGTHS,
        "block_tables": layers.TABLES,
        "page_size": layers.PAGE,
    }
    if name in layers.LAYERS:
        layer = layers.LAYERS[name]
        q, k, v = layers.dense_inputs()
        masks = {}
        if any("mask" in key for key in layer.plan):
            masks["custom_mask"] = layers.dense(layers.random_masks())
        return {"q": q, "k_cache": k, "v_cache": v, **sizes, **layer.attend, **masks}
    if name in coded_inputs():
        return {**coded_inputs()[name], **sizes}
    q, q_rope, latents, ropes = layers.latent_inputs()
    cache = torch.cat([latents, ropes], -1)
    q = torch.cat([q, q_rope], -1)
    values = cache[..., : layers.VALUE]
    return {"q": q, "k_cache": cache, "v_cache": values, **sizes, "window": 20, "scale": 0.2}


def decoded(inputs: dict[str, Any]) -> dict[str, Any]:
    """With what codes stand for in their place."""
    inputs = dict(inputs)
    for cache, name in (("k_cache", "k_scale"), ("v_cache", "v_scale")):
        if (scale := inputs.pop(name, None)) is not None:
            inputs[cache] = inputs[cache].double() * scale[..., None].double()
    return inputs
