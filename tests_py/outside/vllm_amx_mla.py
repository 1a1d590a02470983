# SPDX-License-Identifier: Apache-2.0
"""Tests of vLLM's MLA kernels for AMX: decoding, extending and writing latents.

Tests of products of matrices, and of the class that calls the kernels, are left out.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import cpattn
from cpattn.kv import write_pages
from outside import archive, pytest_cases, suite
from outside.suite import Case, Sample

TESTS = "tests/kernels/attention/test_amx_mla.py"
KERNELS = (
    "test_concat_and_cache_mla_round_trip",
    "test_decode_attention_cpu_matches_reference",
    "test_extend_attention_cpu_matches_reference",
)


def cases() -> Iterator[Case]:
    kernels = {"cpu_mla_decode": decode, "cpu_mla_extend": extend}
    backend = dict.fromkeys(("AMXMLAImpl", "_compute_num_kv_splits"))
    pytest_cases.stand_in(
        {
            "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
            "vllm.utils.torch_utils": {"set_random_seed": torch.manual_seed},
            "vllm._custom_ops": {**kernels, "amx_mla_concat_and_cache": write},
            "vllm.v1.attention.backends.mla.amx_mla": {**backend, "_expand_block_table": slots_of},
        }
    )
    text = archive.read(suite.read_expected()["vllm_amx_mla"], TESTS)[TESTS]
    with patch("torch.cpu._is_amx_tile_supported", lambda: True), patch("torch.cpu._init_amx"):
        module = pytest_cases.load(TESTS, text)
    tests = {name: getattr(module, name) for name in KERNELS}
    yield from pytest_cases.cases(module, tests, Sample(None))


def slots_of(block_table: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the rows of the cache of each request, [requests, tokens]."""
    return (block_table[..., None] * block_size + torch.arange(block_size)).flatten(1)


def attend(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    q_lens: Any,
    scale: float,
) -> None:
    cpattn.paged_attention(
        q, *caches, q_lens=q_lens, kv_lens=kv_lens, block_tables=slots, page_size=1, scale=scale,
        out=out,
    )  # fmt: skip


def decode(
    query: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    output: torch.Tensor,
    key: None,
    value: None,
    loc: None,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    *_: Any,
) -> None:
    slots, ones = req_to_token[req_pool_indices], torch.ones_like(seq_lens)
    attend(query, (k_buffer, v_buffer), output, slots, seq_lens, ones, sm_scale)


def extend(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor,
    v_extend: torch.Tensor,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    sm_scale: float,
    *_: Any,
) -> None:
    slots = req_to_token[req_pool_indices]
    attend(q_extend, (k_buffer, v_buffer), o_extend, slots, seq_lens, extend_seq_lens, sm_scale)


def write(
    kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    latents, keys = kv_cache.unsqueeze(2).split([kv_c_normed.shape[1], k_pe.shape[1]], dim=-1)
    write_pages(slots, kv_c_normed.unsqueeze(1), latents, k_pe.unsqueeze(1), keys)
