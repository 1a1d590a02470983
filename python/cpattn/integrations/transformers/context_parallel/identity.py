# SPDX-License-Identifier: Apache-2.0
"""Digests by which ranks check that they have the same model."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import torch

_ELEMENTS = 64  # of each weight


def config_text(model: Any) -> str:
    """Return the config of a model, without its folder and release."""
    left_out = {"_name_or_path", "transformers_version"}
    config = {k: v for k, v in model.config.to_dict().items() if k not in left_out}
    return json.dumps(config, sort_keys=True, default=str)


def digest_of_weights(model: Any) -> str:
    """Return a digest of names, shapes, dtypes and leading elements of all weights."""
    digest = blake2b(digest_size=16)
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
        begin = weight.detach().reshape(-1)[:_ELEMENTS].contiguous()
        digest.update(begin.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
