# SPDX-License-Identifier: Apache-2.0
"""Tests of vLLM's `merge_attn_states`: `cpattn.merge_states` replaces the kernel, their reference
the other; tokens without a prefix have the suffix's log-sum-exp, as in vLLM."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import cpattn
from outside import archive, pytest_cases, suite
from outside.suite import Case, InexpressibleError, Sample

TESTS = "tests/kernels/attention/test_merge_attn_states.py"
SAMPLED = True
MOST = {"num_tokens": 613, "num_query_heads": 16}


def cases(sample: Sample) -> Iterator[Case]:
    cpu = SimpleNamespace(
        device_type="cpu", is_cuda_alike=lambda: True, get_device_name=lambda: "CPU",
        fp8_dtype=lambda: torch.float8_e4m3fn,
    )  # fmt: skip
    pytest_cases.stand_in(
        {
            "vllm.platforms": {"current_platform": cpu},
            "vllm._custom_ops": {"merge_attn_states": merge, "scaled_fp8_quant": no_codes},
            "vllm.v1.attention.ops.triton_merge_attn_states": {"merge_attn_states": merge},
        }
    )
    text = archive.read(suite.read_expected()["vllm_merge_states"], TESTS)[TESTS]
    module = pytest_cases.load(TESTS, text, print=lambda *_: None, range=lambda _: [0])
    tests = {
        "test_merge_attn_states_both_empty": module.test_merge_attn_states_both_empty,
        "test_merge_attn_states": partial(compared, module),
    }
    yield from pytest_cases.cases(module, tests, sample, small)


def small(parameters: Mapping[str, Any]) -> bool:
    return all(parameters.get(name, 0) <= most for name, most in MOST.items())


def no_codes(*_: Any) -> None:
    raise InexpressibleError("output of float8")


def merge(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
) -> None:
    if output_scale is not None:
        no_codes()
    merged = slice(prefill_tokens_with_context)  # later tokens have only a suffix
    states = (prefix_output, without_inf(prefix_lse)), (suffix_output, without_inf(suffix_lse))
    outs, lses = zip(*((x[merged], lse.T[merged]) for x, lse in states), strict=True)
    output.copy_(suffix_output)
    output[merged], lse = cpattn.merge_states(outs, lses)
    if output_lse is not None:
        output_lse.copy_(states[1][1])
        output_lse[:, merged] = lse.T


def without_inf(lse: torch.Tensor) -> torch.Tensor:
    """Return log-sum-exps with -inf for rows without keys, for which the tests have +inf."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def compared(module: ModuleType, **parameters: Any) -> None:
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda _: 1.0)
    with (
        patch.object(module, "merge_attn_states_triton", in_torch(module.merge_attn_states_torch)),
        patch("torch.Event", lambda **_: event),
        patch("torch.accelerator.synchronize"),
    ):
        module.test_merge_attn_states(**parameters)


def in_torch(reference: Callable[..., Any]) -> Callable[..., None]:
    def merged(output: torch.Tensor, *states: Any) -> None:
        *_, suffix_lse, output_lse, context, _ = states
        states = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in states)
        out, lse = reference(output, *states)
        if context is not None:
            lse[:, context:] = without_inf(suffix_lse)[:, context:]
        output.copy_(out)
        output_lse.copy_(lse)

    return merged
