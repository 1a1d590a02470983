# SPDX-License-Identifier: Apache-2.0
"""Metadata from the plug-in and from sglang's own methods, field by field."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cpattn.integrations import sglang as plugin
from cpattn.integrations.sglang import metadata as plugin_metadata
from support.sglang.installed import MARKS
from support.sglang.sglang_planning import assert_same, make_strategy

pytestmark = MARKS

STRATEGIES = ("zigzag", "interleave")


def random_batch(rng: np.random.Generator) -> tuple[int, int, tuple[Any, Any, Any]]:
    size = int(rng.integers(1, 17))
    bs = int(rng.choice([1, 2, 3, int(rng.integers(4, 300))], p=[0.3, 0.3, 0.3, 0.1]))
    extend = rng.integers(0, rng.choice([4, 100, 9000]), bs)
    seqs = extend + rng.choice([0, 1, 5000], bs) - rng.choice([0, 0, 0, 7], bs)
    num_tokens = int(extend.sum() + rng.choice([0, 0, 1, 37, -1, -50]))
    extend, seqs = extend.tolist(), np.maximum(seqs, 0).tolist()
    if rng.random() < 0.15:
        seqs = [seqs[0]] * int(rng.integers(0, 4))
    seqs, extend = (None if rng.random() < 0.15 else lens for lens in (seqs, extend))
    return int(rng.integers(size)), size, (num_tokens, seqs, extend)


@pytest.mark.parametrize("name", STRATEGIES)
def test_random_batches(sglang, name):
    rng = np.random.default_rng(23)
    for _ in range(1500):
        rank, size, arguments = random_batch(rng)
        if arguments[0] < 0 and not (arguments[1] or arguments[2]):
            continue  # a sequence with a negative number of tokens
        strategy = make_strategy(sglang, name, rank, size)
        theirs = strategy.build_metadata(*arguments)
        assert_same(plugin.build_metadata(strategy, *arguments), theirs, (rank, size, arguments))


CONVERSIONS: dict[str, Callable[[list[int]], Any]] = {
    "tuple": tuple,
    "numpy": np.array,
    "int32": lambda lens: np.array(lens, np.int32),
    "numpy ints": lambda lens: [np.int64(n) for n in lens],
    "torch": torch.tensor,
    "torch ints": lambda lens: list(torch.tensor(lens)),
    "floats": lambda lens: [float(n) for n in lens],
    "bools": lambda lens: [n > 0 for n in lens],
    "range": lambda lens: range(40, 40 + len(lens)),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("kind", CONVERSIONS)
def test_kinds_of_integers(sglang, name, kind):
    strategy = make_strategy(sglang, name, 1, 4)
    for num_tokens in (138, np.int64(141), torch.tensor(150)):

        def arguments(num_tokens: Any = num_tokens) -> dict[str, Any]:
            """Make new arguments, as sglang pads the last element of a tensor in place."""
            extend, seqs = CONVERSIONS[kind]([40, 41, 57]), CONVERSIONS[kind]([140, 41, 99])
            return {"num_tokens": num_tokens, "seqs_len": seqs, "extend_seqs_len": extend}

        theirs = strategy.build_metadata(**arguments())
        assert_same(plugin.build_metadata(strategy, **arguments()), theirs)
        assert_same(plugin.build_metadata(strategy, *arguments().values()), theirs)


@pytest.mark.parametrize("name", STRATEGIES)
def test_physical_padding_writes_into_the_result(sglang, name):
    strategy = make_strategy(sglang, name, 2, 4)
    arguments = (101, [60, 80], [40, 60])
    ours, theirs = plugin.build_metadata(strategy, *arguments), strategy.build_metadata(*arguments)
    parallel = sglang.runtime.get_parallel()
    with parallel.override(attn_cp_size=4):
        for metadata in (ours, theirs):
            sglang.padding.pad_logical_token_to_physical(metadata)
    assert ours.per_rank_logical_token is not None
    assert_same(ours, theirs)
    assert arguments == (101, [60, 80], [40, 60])  # unchanged


def tensors_of(metadata: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(metadata).items() if name.endswith("_tensor")}


def test_tensors_on_sglangs_device_are_aligned(sglang, monkeypatch):
    """The device "meta" has shapes and offsets, like a device with its own memory."""
    device = SimpleNamespace(device="meta:0")
    engine = plugin_metadata._engine()._replace(get_device=lambda: device)
    monkeypatch.setattr(plugin_metadata, "_engine", lambda: engine)
    strategy = make_strategy(sglang, "zigzag", 1, 3)
    arguments = (120, [70, 90, 3], [50, 67, 3])
    ours = tensors_of(plugin.build_metadata(strategy, *arguments))
    for name, wanted in tensors_of(strategy.build_metadata(*arguments)).items():
        got = ours[name]
        assert (got.device.type, got.dtype, got.shape) == ("meta", torch.int32, wanted.shape)
        assert 4 * got.storage_offset() % 64 == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, [9], [-1]), "extend_lens must be >= 0 and fit into int32, got -1 at index 0"),
        ((2, [2**31 - 1] * 2, [1, 1]), "cu_seqlens_kv_prev_tensor .* where it fits into int32"),
        ((5, None, ["five"]), "invalid literal for int"),
    ],
)
def test_what_is_refused(sglang, arguments, message):
    with pytest.raises(ValueError, match=message):
        plugin.build_metadata(make_strategy(sglang, "zigzag", 0, 2), *arguments)
