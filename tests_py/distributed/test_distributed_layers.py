# SPDX-License-Identifier: Apache-2.0
"""Windows, sinks, masks, latents and selections over gloo ranks: the bits of one process."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from support.cases import dense, packed
from support.distributed import layer_worker as worker
from support.distributed.distributed_worker import run_world

NAMES = [*worker.LAYERS, "latents, rope apart", "latents", "sparse"]
LENS = {"extend_lens": [4, 6], "seq_lens": [9, 6], "block_tables": [[5, 3, 9], [2, 7, -1]]}


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def answers(request, tmp_path_factory):
    return run_world(request.param, tmp_path_factory.mktemp("world"), worker.run_layers)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", worker.STRATEGIES)
@pytest.mark.parametrize("name", NAMES)
def test_every_rank_gathers_the_bits_of_one_process(answers, name, strategy):
    expected = worker.alone(name)
    for answer in answers:
        for result, whole in zip(answer[f"{strategy}: {name}"], expected, strict=True):
            assert torch.equal(result, whole)


@pytest.fixture(scope="module")
def cp(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(minutes=1))
    yield ContextParallel(dist.group.WORLD, page_size=4)
    dist.destroy_process_group()


def masks(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.random(shape) < 0.5 for shape in [(4, 9), (6, 6)]]


@pytest.mark.parametrize("container", [np.asarray, torch.from_numpy])
def test_a_plan_keeps_its_mask_as_bits_of_its_own(cp, container):
    mask = container(dense(masks()))
    plan = cp.plan(**LENS, custom_mask=mask)
    assert plan.packed_custom_mask.tolist() == packed(masks()).tolist()
    assert plan == cp.plan(**LENS, packed_custom_mask=container(packed(masks())))
    mask[:] = True
    assert plan.packed_custom_mask.tolist() == packed(masks()).tolist()
    with pytest.raises(ValueError, match="read-only"):
        plan.packed_custom_mask[0] = 1
    assert plan != cp.plan(**LENS, custom_mask=mask)
    assert plan != cp.plan(**LENS)
    assert cp.plan(**LENS).packed_custom_mask is None


def test_padding_tokens_see_nothing_and_are_not_seen(cp):
    padded = [masks()[0], np.pad(masks()[1], ((0, 3), (0, 3)))]
    for mask in ({"custom_mask": dense(masks())}, {"packed_custom_mask": packed(masks())}):
        plan = cp.plan(**LENS, num_tokens=13, **mask)
        assert plan.packed_custom_mask.tolist() == packed(padded).tolist()
        assert plan.num_padding_tokens == 3


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (
            {"custom_mask": np.ones(72, bool), "packed_custom_mask": np.ones(10, np.uint8)},
            ValueError,
            "give either custom_mask or packed_custom_mask, got both",
        ),
        ({"custom_mask": np.ones(72)}, ValueError, "custom_mask must be bool, got float64"),
        (
            {"custom_mask": np.ones(71, bool)},
            ValueError,
            r"custom_mask must have sum\(q_len \* kv_len\) = 72 elements, got 71",
        ),
        (
            {"packed_custom_mask": np.ones(9, np.uint8)},
            ValueError,
            r"must have sum\(ceil\(q_len \* kv_len / 8\)\) = 10 bytes, got 9",
        ),
        (
            {"packed_custom_mask": np.ones(10, bool)},
            ValueError,
            "packed_custom_mask must be uint8, got bool",
        ),
        ({"custom_mask": [True] * 72}, TypeError, "custom_mask must be a tensor"),
    ],
)
def test_plan_refuses(cp, mask, error, message):
    with pytest.raises(error, match=message) as raised:
        cp.plan(**LENS, **mask)
    assert str(raised.value).startswith("ContextParallel.plan: ")


def test_attend_refuses(cp):
    plan = cp.plan(**LENS, num_tokens=12)
    caches = torch.zeros(2, 40, 1, 16)
    with pytest.raises(ValueError, match="causal=False needs a mask, or a plan without padding"):
        cp.attend(plan, torch.zeros(12, 2, 16), *caches, causal=False)
    with pytest.raises(ValueError, match=r"q_rope must be \[num_rows, num_heads, rope_dim\]"):
        cp.attend(
            plan, torch.zeros(12, 2, 16), *caches, q_rope=torch.zeros(12, 32), k_rope=caches[0]
        )
    with pytest.raises(ValueError, match="v_head_dim must be given without v_cache"):
        cp.attend(plan, torch.zeros(12, 2, 16), caches[0], None)


def test_attend_sparse_refuses_a_mask(cp):
    plan = cp.plan(**LENS, custom_mask=dense(masks()))
    index = torch.zeros(10, 1, 16), torch.zeros(10, 4, 16), torch.zeros(10, 1)
    with pytest.raises(ValueError, match=r"attend_sparse: plan must have no mask"):
        cp.attend_sparse(
            plan, torch.zeros(10, 2, 32), torch.zeros(40, 1, 32), *index, topk=2, sm_scale=1.0
        )


@pytest.mark.parametrize("missing", ["v_local", "v_cache"])
def test_values_come_with_their_cache(cp, missing):
    plan = cp.plan(**LENS)
    tensors = {
        "k_local": torch.ones(10, 1, 2),
        "v_local": torch.ones(10, 1, 2),
        "k_cache": torch.zeros(40, 1, 2),
        "v_cache": torch.zeros(40, 1, 2),
        missing: None,
    }
    with pytest.raises(ValueError, match=f"write_kv: v_local and v_cache must .* got no {missing}"):
        cp.write_kv(plan, **tensors)
    assert not tensors["k_cache"].any()
