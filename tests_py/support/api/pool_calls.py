# SPDX-License-Identifier: Apache-2.0
"""Good calls of KV pools."""

from __future__ import annotations

import numpy as np

import cpattn
from support.api.api_call_kinds import Good


def mha_pool() -> cpattn.kv.MHATokenToKVPool:
    return cpattn.kv.MHATokenToKVPool(
        size=16, page_size=4, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32"
    )


def mla_pool() -> cpattn.kv.MLATokenToKVPool:
    return cpattn.kv.MLATokenToKVPool(
        size=16,
        page_size=4,
        num_layers=2,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        index_head_dim=8,
        dtype="float32",
    )


def scaled_pool() -> cpattn.kv.MHATokenToKVPool:
    return cpattn.kv.MHATokenToKVPool(
        size=16, page_size=4, num_layers=2, num_kv_heads=2, head_dim=8, dtype="int8",
        scale_dtype="float32",
    )  # fmt: skip


def dsa_pool() -> cpattn.kv.DSATokenToKVPool:
    return cpattn.kv.DSATokenToKVPool(size=16, page_size=4, num_layers=2, index_head_dim=128)


def set_kv() -> Good:
    pool = mha_pool()
    arguments = {
        "layer_id": ("int", 1),
        "loc": ("ints", [1, 6]),
        "k": ("tensor", np.ones((2, 2, 8), np.float32)),
        "v": ("?tensor", np.ones((2, 2, 8), np.float32)),
        "k_scale": ("?float", 1.0),
        "v_scale": ("?float", 1.0),
    }
    return Good(pool.set_kv_buffer, arguments, names=("k ", "v "))


def set_codes() -> Good:
    arguments = {
        "layer_id": ("int", 1),
        "loc": ("ints", [1, 6]),
        "k": ("tensor", np.ones((2, 2, 8), np.int8)),
        "v": ("tensor", np.ones((2, 2, 8), np.int8)),
        "k_scale": ("tensor", np.ones((2, 2), np.float32)),
        "v_scale": ("tensor", np.ones((2, 2), np.float32)),
    }
    return Good(scaled_pool().set_kv_buffer, arguments, names=("k ", "v "))


def set_dsa_rows() -> Good:
    arguments = {
        "layer_id": ("int", 1),
        "loc": ("ints", [1, 6]),
        "k": ("tensor", np.ones((2, 512), np.float32)),
        "v": ("?tensor", np.ones((2, 64), np.float32)),
    }
    return Good(
        dsa_pool().set_kv_buffer, arguments, names=("k ", "nope", "rope"),
        prefixes=("quantize_kv_rows: ",),
    )  # fmt: skip


def set_dsa_index_k() -> Good:
    arguments = {
        "layer_id": ("int", 1),
        "loc": ("ints", [1, 6]),
        "index_k": ("tensor", np.ones((2, 128), np.float32)),
        "k_scale": ("?tensor", None),
    }
    return Good(
        dsa_pool().set_index_k_buffer, arguments, names=("slots", "k "),
        prefixes=("write_index_k_cache: ",),
    )  # fmt: skip


def set_latent() -> Good:
    arguments = {
        "layer_id": ("int", 1),
        "loc": ("ints", [1, 6]),
        "k": ("tensor", np.ones((2, 1, 16), np.float32)),
        "v": ("?tensor", np.ones((2, 1, 8), np.float32)),
    }
    return Good(mla_pool().set_kv_buffer, arguments, names=("k ", "v "))


def set_index_k() -> Good:
    arguments = {
        "layer_id": ("int", 1),
        "loc": ("ints", [1, 6]),
        "index_k": ("tensor", np.ones((2, 1, 8), np.float32)),
    }
    return Good(mla_pool().set_index_k_buffer, arguments)
