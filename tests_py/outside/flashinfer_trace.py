# SPDX-License-Identifier: Apache-2.0
"""Trace templates of FlashInfer: their inputs, torch reference and check of each operation, with
cpattn instead of the kernel."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch

import cpattn
from cpattn.integrations import flashinfer
from outside import archive, pytest_cases, suite
from outside.suite import Case

FOLDER = "flashinfer/trace"
#: Modules in the order of their imports.
MODULES = "template", "templates._init_helpers", "templates.attention", "templates.cascade"
Inputs = dict[str, Any]
Call = Callable[[Inputs], tuple[Inputs, Any]]


def cases() -> Iterator[Case]:
    """Yield each template with several sizes."""
    paths = {name: f"{FOLDER}/{name.replace('.', '/')}.py" for name in MODULES}
    texts = archive.read(suite.read_expected()["flashinfer_trace"], *paths.values())
    pytest_cases.stand_in({f"flashinfer.trace.{name}": {} for name in MODULES})
    for name, path in paths.items():
        module = sys.modules[f"flashinfer.trace.{name}"]
        module.__package__ = module.__name__.rpartition(".")[0]
        exec(compile(texts[path], path, "exec"), vars(module))
    trace: Any = sys.modules["flashinfer.trace"]
    trace.default_check = trace.template.default_check
    for module, calls in (
        (trace.templates.attention, ATTENTION),
        (trace.templates.cascade, MERGES),
    ):
        for name, (call, sizes) in calls.items():
            for size in sizes:
                label = ", ".join(f"{axis} {length}" for axis, length in size.items())
                yield Case(f"{name}, {label}", partial(check, module, f"{name}_trace", call, size))


def check(module: ModuleType, name: str, call: Call, size: Mapping[str, int]) -> None:
    template = getattr(module, name)
    inputs = template.init(**size, device="cpu")
    asked, found = call(inputs)
    assert template.check(template.reference(**asked), found), "not what the reference gives"


def in_two_parts(inputs: Inputs) -> tuple[Inputs, float]:
    """Return the inputs of the reference of a kernel with a plan, and the scale."""
    plan, run = inputs["plan"], dict(inputs["run"])
    scale = plan.get("sm_scale", plan.get("head_dim", plan.get("head_dim_qk", 1)) ** -0.5)
    if "paged_kv_cache" in run:
        run["k_cache"], run["v_cache"] = run.pop("paged_kv_cache")
    for name in ("qo_indptr", "kv_indptr", "kv_indices"):
        given = plan.get(name, plan.get(f"paged_{name}", plan.get(name.removeprefix("kv_"))))
        if given is not None:
            run[name] = given
    return run | {"sm_scale": scale}, scale


def by_wrapper(wrapper: type, inputs: Inputs) -> tuple[Inputs, Any]:
    attention = wrapper(torch.empty(0, dtype=torch.uint8))
    attention.plan(**inputs["plan"])
    return in_two_parts(inputs)[0], attention.run(**inputs["run"], return_lse=True)


def to_base_2(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return out, lse / math.log(2)


def ragged(inputs: Inputs) -> tuple[Inputs, Any]:
    asked, scale = in_two_parts(inputs)
    k, v = (asked[name].unsqueeze(1) for name in "kv")
    num_keys = len(k)
    found = cpattn.paged_attention(
        asked["q"], k, v, q_lens=asked["qo_indptr"].diff(), kv_indptr=asked["kv_indptr"],
        kv_indices=torch.arange(num_keys, dtype=torch.int32),
        last_page_len=torch.ones(len(asked["kv_indptr"]) - 1, dtype=torch.int32),
        scale=scale, return_lse=True,
    )  # fmt: skip
    return asked, to_base_2(*found)


def latent(inputs: Inputs) -> tuple[Inputs, Any]:
    asked, scale = in_two_parts(inputs)
    q_lens = asked["qo_indptr"].diff()
    cache = torch.cat([asked["ckv_cache"], asked["kpe_cache"]], -1).unsqueeze(2)
    plan = inputs["plan"]
    page_size = plan["page_size"]
    found = cpattn.paged_attention(
        torch.cat([asked["q_nope"], asked["q_pe"]], -1), cache, cache[..., : plan["head_dim_ckv"]],
        q_lens=q_lens, kv_indptr=asked["kv_indptr"], kv_indices=asked["kv_indices"],
        last_page_len=(plan["kv_len_arr"] - 1) % page_size + 1, causal=plan["causal"],
        scale=scale, return_lse=True,
    )  # fmt: skip
    if not plan["causal"]:  # the reference of decoding has one token per sequence
        asked.pop("qo_indptr")
    return asked, to_base_2(*found)


def single(inputs: Inputs) -> tuple[Inputs, Any]:
    """Call the function in float16, for which the check is meant."""
    asked = {name: x.half() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    q, k, v = asked["q"], asked["k"].unsqueeze(0), asked["v"].unsqueeze(0)
    rows = q if q.ndim == 3 else q.unsqueeze(0)
    out = cpattn.paged_attention(
        rows, k, v, q_lens=[len(rows)], kv_lens=[k.shape[1]], block_tables=[[0]],
        causal=asked.get("causal", False),
    )  # fmt: skip
    return asked, out.view(q.shape)


def of_trtllm(inputs: Inputs) -> tuple[Inputs, Any]:
    q, cache, kv_lens = inputs["query"], inputs["kv_cache"], inputs["seq_lens"]
    starts = inputs.get("cum_seq_lens_q")
    q_lens = torch.full_like(kv_lens, len(q) // len(kv_lens)) if starts is None else starts.diff()
    out = cpattn.paged_attention(
        q, cache[:, 0], cache[:, -1], q_lens=q_lens, kv_lens=kv_lens, kv_layout="HND",
        block_tables=inputs["block_tables"], scale=inputs["bmm1_scale"],
        causal=starts is not None,
    )  # fmt: skip
    return inputs, out.to(q.dtype)


def merged(function: Callable[..., Any], inputs: Inputs) -> tuple[Inputs, Any]:
    given = {name: x.clone() for name, x in inputs.items()}
    found = function(**given)
    return inputs, (given["v"], given["s"]) if found is None else found


ATTENTION: dict[str, tuple[Call, list[dict[str, int]]]] = {
    "gqa_paged_decode": (
        partial(by_wrapper, flashinfer.BatchDecodeWithPagedKVCacheWrapper),
        [
            {"batch_size": 1},
            {"batch_size": 3, "page_size": 1},
            {"batch_size": 4, "num_kv_heads": 1},
        ],
    ),
    "gqa_paged_prefill": (
        partial(by_wrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper),
        [
            {"total_q": 5, "num_qo_heads": 8, "num_pages_per_seq": 2},
            {"total_q": 20, "num_qo_heads": 4, "num_kv_heads": 2, "batch_size": 3},
        ],
    ),
    "gqa_ragged_prefill": (
        ragged,
        [
            {"total_q": 12, "total_kv": 90, "num_qo_heads": 8},
            {"total_q": 9, "num_qo_heads": 8, "batch_size": 1},
        ],
    ),
    "mla_paged_decode": (latent, [{"batch_size": 1}, {"batch_size": 3, "page_size": 16}]),
    "mla_paged_prefill": (latent, [{"total_q": 7}, {"total_q": 12, "page_size": 16}]),
    "single_decode_with_kv_cache": (single, [{"kv_len": 1}, {"kv_len": 500}]),
    "single_prefill_with_kv_cache": (single, [{"qo_len": 1}, {"qo_len": 70, "num_kv_heads": 2}]),
    "trtllm_batch_decode": (
        of_trtllm,
        [{"num_tokens": n, "batch_size": n, "max_pages_per_seq": 5} for n in (1, 3)],
    ),
    "trtllm_batch_context": (
        of_trtllm,
        [{"num_tokens": 11 * n, "batch_size": n, "max_pages_per_seq": 2} for n in (1, 3)],
    ),
}
MERGES: dict[str, tuple[Call, list[dict[str, int]]]] = {
    "merge_state": (partial(merged, flashinfer.merge_state), [{"seq_len": 1}, {"seq_len": 37}]),
    "merge_state_in_place": (
        partial(merged, flashinfer.merge_state_in_place),
        [{"seq_len": 1}, {"seq_len": 37}],
    ),
    "merge_states": (
        partial(merged, flashinfer.merge_states),
        [{"seq_len": 5, "num_states": 1}, {"seq_len": 37, "num_states": 4}],
    ),
}
