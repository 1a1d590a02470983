# SPDX-License-Identifier: Apache-2.0
"""Tests of flash-attention for its own functions, on `cpattn.integrations.flash_attn` and the CPU;
gradients are zeros. Lengths above 217 are left out: references in 16 bits are slow on CPUs."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from cpattn.integrations import flash_attn
from outside import archive, pytest_cases, suite
from outside.suite import Case, InexpressibleError, Sample

TESTS, PADDING = "tests/test_flash_attn.py", "flash_attn/bert_padding.py"
ROTARY = "flash_attn/layers/rotary.py"
SAMPLED = True
#: Tests that compare results; other tests are only about gradients.
NAMES = (
    "output", "varlen_output", "causal", "varlen_causal", "splitkv", "kvcache", "qkvpacked",
    "varlen_qkvpacked",
)  # fmt: skip
LONGEST = 217


def cases(sample: Sample) -> Iterator[Case]:
    texts = archive.read(suite.read_expected()["flash_attn"], TESTS, PADDING, ROTARY)
    padding = pytest_cases.load(PADDING, texts[PADDING])
    pytest_cases.stand_in({"flash_attn.ops.triton.rotary": {"apply_rotary": None}})
    turn = pytest_cases.load(ROTARY, texts[ROTARY]).apply_rotary_emb_torch
    pytest_cases.stand_in(
        {
            "flash_attn": functions(),
            "flash_attn.bert_padding": vars(padding),
            "flash_attn.flash_attn_interface": {"_get_block_size_n": None},  # dropout needs it
            "flash_attn.layers.rotary": {"apply_rotary_emb": partial(rotary, turn)},
        }
    )
    text = texts[TESTS].replace('"cuda"', '"cpu"')
    with patch("torch.cuda.get_device_capability", lambda _: (9, 0)):
        module = pytest_cases.load(TESTS, text, print=lambda _: None)
    module.attention_ref = remembered = Remembered(module.attention_ref)
    names = [f"test_flash_attn_{name}" for name in NAMES]
    tests = {name: partial(forward, vars(module)[name], remembered) for name in names}
    yield from pytest_cases.cases(module, tests, sample, short)


def short(parameters: Mapping[str, Any]) -> bool:
    return all(parameters.get(name, 0) <= LONGEST for name in ("seqlen", "seqlen_q", "seqlen_k"))


class Remembered:
    """A reference that remembers results for all instruction sets, as a case seeds its numbers."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        self._compute = compute
        self._case: Any = None

    def begin(self, *case: Any) -> None:
        if case != self._case:
            self._case, self._results = case, list[Any]()
        self._calls = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._calls == len(self._results):
            self._results.append(self._compute(*arguments, **options))
        self._calls += 1
        return self._results[self._calls - 1]


def forward(test: Callable[..., None], remembered: Remembered, **parameters: Any) -> None:
    remembered.begin(test, parameters)
    with torch.no_grad(), patch("torch.autograd.grad", zeros):
        test(**parameters)


def zeros(_: torch.Tensor, inputs: Any, *others: Any) -> tuple[torch.Tensor, ...]:
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    return tuple(map(torch.zeros_like, inputs))


def rotary(
    turn: Callable[..., Any],
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """Rotate tokens like the kernel of flash-attention, which rounds only its result."""
    positions = seqlen_offsets[:, None] + torch.arange(x.shape[1])
    angles = (table[positions].float() for table in (cos, sin))
    return turn(x.float(), *angles, interleaved).to(x.dtype)


def refusing(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return function(*arguments, **options)
    except ValueError as error:
        if named := re.search(r": (\w+) (?:is not supported|must be 0)", str(error)):
            raise InexpressibleError(named[1]) from error
        raise


def functions() -> dict[str, Callable[..., Any]]:
    """Return the functions that the tests import; packed tensors are taken apart."""
    dense = partial(refusing, flash_attn.flash_attn_func)
    ragged = partial(refusing, flash_attn.flash_attn_varlen_func)

    def varlen_qkvpacked(qkv: Any, ends: Any, longest: int, dropout: float, **options: Any) -> Any:
        return ragged(*qkv.unbind(-3), ends, ends, longest, longest, dropout, **options)

    return {
        "flash_attn_func": dense,
        "flash_attn_kvpacked_func": lambda q, kv, *a, **k: dense(q, *kv.unbind(-3), *a, **k),
        "flash_attn_qkvpacked_func": lambda qkv, *a, **k: dense(*qkv.unbind(-3), *a, **k),
        "flash_attn_varlen_func": ragged,
        "flash_attn_varlen_kvpacked_func": lambda q, kv, *a, **k: ragged(
            q, *kv.unbind(-3), *a, **k
        ),
        "flash_attn_varlen_qkvpacked_func": varlen_qkvpacked,
        "flash_attn_with_kvcache": partial(refusing, flash_attn.flash_attn_with_kvcache),
    }
