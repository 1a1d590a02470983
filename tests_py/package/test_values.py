# SPDX-License-Identifier: Apache-2.0
"""Plans and metadata are values: compared, hashed, pickled, copied, and made by functions only."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import cpattn
from cpattn import ForwardMode, _core
from cpattn.context_parallel.vllm_0_32 import PCPLayout, build_pcp_layout

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def attention_plan(**changes: Any) -> cpattn.AttentionPlan:
    batch = {
        "q_lens": [3, 0, 40], "kv_lens": [10, 0, 2000], "page_size": 8, "num_pages": 300,
        "block_tables": np.arange(750).reshape(3, 250) % 300, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 32, "v_head_dim": 16,
    }  # fmt: skip
    return cpattn.plan_attention(**batch | changes)


MASK = np.random.default_rng(0).random(30 + 40 * 2000) < 0.5


def dsa_metadata(
    extend: Any, seq: Any, mode: ForwardMode, **changes: Any
) -> cpattn.sparse.DsaMetadata:
    options = {"topk": 16, "fp8_kv_cache": True, "prefill_impl": "flashmla_sparse"}
    return cpattn.sparse.build_dsa_metadata(extend, seq, forward_mode=mode, **options | changes)


def cp(rank: int, strategy: str, **options: Any) -> cpattn.ContextParallelMetadata:
    return cpattn.build_cp_metadata(
        [7, 5, 0, 30], [9, 50, 6, 30], cp_rank=rank, cp_size=3, strategy=strategy, **options
    )


SLOTS = np.arange(4 * 64).reshape(4, 64)


def shard_gather(prefix_lens: Any, seq_lens: Any) -> cpattn.kv.ShardGatherPlan:
    return cpattn.kv.plan_shard_gather(
        SLOTS, [1, 3], prefix_lens, seq_lens, size=200, max_prefix_tokens=96, chunk_tokens=64,
        placement=cpattn.kv.PageInterleave(shard_size=3, page_size=4),
    )  # fmt: skip


def pcp_layout(**options: Any) -> PCPLayout:
    return build_pcp_layout([7, 1, 0, 30, 2], [9, 50, 6, 0, 3], pcp_size=3, **options)


VALUES = {
    "plan": attention_plan(),
    "windowed plan": attention_plan(window=5, num_threads=3, batch_invariant=True),
    "precise plan": attention_plan(precise=True),
    "masked plan": attention_plan(custom_mask=MASK, causal=False),
    "mask of one bit behind a word": attention_plan(
        q_lens=[2], kv_lens=[33], block_tables=np.arange(5)[None], custom_mask=MASK[:66]
    ),
    "empty plan": attention_plan(q_lens=[], kv_lens=[], block_tables=np.zeros((0, 1), int)),
    "zigzag": cp(0, "zigzag"),
    "padded zigzag": cp(1, "zigzag").pad_to_physical(),
    "interleave": cp(2, "interleave"),
    "contiguous": cp(2, "contiguous", kv_len_convention="bare"),
    "weights": cp(1, "contiguous", weights=[1, 2.5, 1]),
    "weights and pages": cp(1, "zigzag", weights=[1, 2, 1], page_size=4),
    "pages": cp(1, "zigzag", page_size=4),
    "more tokens": cp(1, "zigzag", num_tokens=60),
    "ragged": dsa_metadata(
        [3, 2], [10, 4], ForwardMode.EXTEND, req_to_token=SLOTS, page_size=2, num_rows=9
    ),
    "without prefix": dsa_metadata([3, 2], [3, 2], ForwardMode.EXTEND, req_to_token=SLOTS),
    "without tables": dsa_metadata([3, 2], [10, 4], ForwardMode.EXTEND),
    "least and most": dsa_metadata(
        [0, 1], [0, 4], ForwardMode.EXTEND, topk=1, page_size=2**31 - 1
    ),
    "pcp": pcp_layout(),
    "pcp and dcp": pcp_layout(dcp_size=2, is_prefill=[True, False, True, True, False]),
    "padded pcp": pcp_layout(shard_decode=False, padded_num_tokens=40),
    "gather": shard_gather([32, 16], [40, 63]),
    "nothing to gather": shard_gather([0, 0], [40, 0]),
    "decode": dsa_metadata(None, [10, 4], ForwardMode.DECODE, req_to_token=SLOTS),
    "verify": dsa_metadata(None, [10, 1], ForwardMode.TARGET_VERIFY, num_draft_tokens=4),
    **{
        f"dsa {strategy} {rank}": dsa_metadata(
            [7, 5, 0, 30], [9, 50, 6, 30], ForwardMode.EXTEND, cp_metadata=cp(rank, strategy),
            req_to_token=SLOTS,
        )
        for strategy in ("zigzag", "interleave", "contiguous")
        for rank in (0, 2)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_pickles_and_copies_are_equal_values(name):
    value = VALUES[name]
    for protocol in PROTOCOLS:
        again = pickle.loads(pickle.dumps(value, protocol))
        assert type(again) is type(value)
        assert again == value
        assert hash(again) == hash(value)
        assert repr(again) == repr(value)
    assert copy.copy(value) is value
    assert copy.deepcopy([value])[0] is value


def test_a_pickled_plan_runs():
    plan = attention_plan(custom_mask=MASK, causal=False)
    rng = np.random.default_rng(1)
    layer = [
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((43, 4, 32), (300, 8, 2, 32), (300, 8, 2, 16))
    ]
    again = pickle.loads(pickle.dumps(plan))
    assert np.array_equal(
        cpattn.run_attention(again, *layer), cpattn.run_attention(plan, *layer), equal_nan=True
    )


def test_values_serve_as_keys():
    assert len({VALUES["plan"], attention_plan(), VALUES["windowed plan"]}) == 2
    assert len({cp(0, "zigzag"), VALUES["zigzag"], VALUES["interleave"]}) == 2
    ragged = dsa_metadata([3, 2], [10, 4], ForwardMode.EXTEND)
    assert {ragged: 1}[VALUES["without tables"]] == 1
    assert VALUES["plan"] != VALUES["zigzag"]
    assert VALUES["plan"] != 3


RESTORE = {
    PCPLayout: _core.restore_pcp_layout,
    cpattn.kv.ShardGatherPlan: _core.restore_shard_gather_plan,
    cpattn.AttentionPlan: _core.restore_attention_plan,
    cpattn.ContextParallelMetadata: _core.restore_context_parallel_metadata,
    cpattn.sparse.DsaMetadata: _core.restore_dsa_metadata,
}
ODD = [
    None, "x", 1.5, -1, 2**31, 2**62, 2**70, b"", [], [-1], [0, 1], [2**40], [2**70], ["x"],
    np.zeros((2, 2)), np.array([-5, 7]), np.zeros(1, np.uint8), True,
]  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_corrupt_states_are_refused_or_states_of_values(name):
    """Each field in turn is replaced by odd objects and by the fields of other values."""
    value = VALUES[name]
    restore = RESTORE[type(value)]
    others = [other._state() for other in VALUES.values() if type(other) is type(value)]
    state = value._state()
    refused = 0
    for i in range(len(state)):
        for odd in [*ODD, *(other[i] for other in others)]:
            try:
                again = restore((*state[:i], odd, *state[i + 1 :]))
            except ValueError:
                refused += 1
            else:
                assert restore(again._state()) == again
                assert repr(again)
                if isinstance(again, cpattn.sparse.DsaMetadata):
                    again.to_dict()
    assert refused > len(state) * len(ODD) // 2
    for odd in (None, (), state[:-1], (*state, 0), list(state)):
        with pytest.raises(ValueError, match=f"^{type(value).__name__}: a state must be a tuple"):
            restore(odd)


@pytest.mark.parametrize("made", RESTORE)
def test_values_have_no_constructor(made):
    for construct in (made, lambda: made.__new__(made), lambda: made(1, x=2)):
        with pytest.raises(TypeError, match=f"^{made.__name__} has no constructor"):
            construct()


BOUND = [
    value
    for value in vars(_core).values()
    if isinstance(value, type) and type(value).__name__ == "pybind11_type"
]


def use(value: Any, name: str) -> None:
    attribute = getattr(value, name)
    attribute(value) if name == "__eq__" else attribute()


@pytest.mark.parametrize("made", BOUND, ids=lambda made: made.__name__)
def test_objects_that_were_never_constructed_have_no_uses(made):
    empty = made.__base__.__new__(made)  # like cls.__new__(cls) of a class with a constructor
    tried = 0
    for name in dir(made):
        if name.startswith("__") and name not in ("__eq__", "__hash__", "__len__", "__enter__"):
            continue
        if getattr(object, name, None) is getattr(made, name):
            continue
        tried += 1
        with pytest.raises(TypeError):
            use(empty, name)
    assert tried or made is _core.PoolMemory  # it is a buffer and has no methods
    with pytest.raises(TypeError):
        cpattn.run_attention(empty, np.ones((3, 2, 16), np.float32), None, None, scale=1.0)


def test_objects_of_this_process_cannot_be_pickled():
    fia = _core.Fia.__base__.__new__(_core.Fia)
    buffer = _core.KVBuffer("f", 1, 8, 8, "float32")
    span = _core.TraceSpan(_core.TraceScope.gather)
    allocator = cpattn.kv.StripedAllocator(8, page_size=2, shard_size=2)
    for value in (buffer, span, _core.MemoryRanges(), fia, allocator):
        for protocol in PROTOCOLS:
            message = f"^{type(value).__name__} cannot be pickled or copied"
            with pytest.raises(TypeError, match=message):
                pickle.dumps(value, protocol)
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            copy.deepcopy(value)
