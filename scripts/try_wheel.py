# SPDX-License-Identifier: Apache-2.0
"""Tries an installed cpattn, with NumPy alone: `python try_wheel.py portable,avx2,avx512`.

The argument names the instruction sets that must be there on this processor. Attention, the indexer
of sparse attention and its top-k are computed by each of them and compared with the oracle; then a
plan is made and KV is moved. The tests say more; this runs where pytest cannot, as under qemu.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import cpattn


def is_installed() -> None:
    """It is the package of this environment, with its types, and not that of the sources."""
    folder = Path(cpattn.__file__).parent
    assert "site-packages" in str(folder), f"{folder} is not an installed package"
    assert (folder / "py.typed").exists(), f"{folder} has no py.typed"


def attend(q_lens: list[int], kv_lens: list[int], dtype: type = np.float32) -> None:
    """Prefill behind a prefix, and decode, on shuffled pages."""
    rng = np.random.default_rng(len(q_lens))
    pages = -(-max(kv_lens) // 16)
    block_tables = rng.permutation(len(kv_lens) * pages).reshape(len(kv_lens), pages)
    k_cache, v_cache = (
        rng.standard_normal((block_tables.size, 16, 2, 64)).astype(dtype) for _ in range(2)
    )
    q = rng.standard_normal((sum(q_lens), 8, 64)).astype(dtype)
    batch = {"q_lens": q_lens, "kv_lens": kv_lens, "block_tables": block_tables.astype(np.int32)}
    out = cpattn.paged_attention(q, k_cache, v_cache, page_size=16, **batch)
    expected, _ = cpattn.reference.paged_attention(q, k_cache, v_cache, page_size=16, **batch)
    limit = 1e-5 if dtype is np.float32 else 2e-3
    np.testing.assert_allclose(out.astype(np.float64), expected, atol=limit, rtol=limit)


def index() -> None:
    """The choice of keys is exact: scores of small integers leave no doubt."""
    rng = np.random.default_rng(0)
    q, k, weights = (
        rng.integers(-3, 4, shape).astype(np.float32) for shape in ((7, 4, 64), (300, 64), (7, 4))
    )
    starts, ends = np.zeros(7, np.int32), np.arange(294, 301, dtype=np.int32)
    logits = cpattn.reference.indexer_logits(q, k, weights, starts, ends)
    chosen = cpattn.sparse.indexer_topk(q, k, weights, starts, ends, topk=32)
    for row, end in enumerate(ends):
        best = np.argsort(-logits[row, :end], kind="stable")[:32]
        np.testing.assert_array_equal(chosen[row], best)


def plan() -> None:
    """Every new token belongs to one rank."""
    rows = [
        cpattn.build_cp_metadata([200, 14], [300, 14], cp_rank=rank, cp_size=4).local_q_indices
        for rank in range(4)
    ]
    owned = np.concatenate([np.asarray(indices) for indices in rows])
    np.testing.assert_array_equal(np.sort(owned[owned >= 0]), np.arange(214))


def move() -> None:
    """Memory to memory, by the engine inside one process."""
    source, target = np.arange(64), np.zeros(64, int)
    with cpattn.transfer.LocalEngine() as sender, cpattn.transfer.LocalEngine() as receiver:
        sender.register([source.ctypes.data], [source.nbytes])
        receiver.register([target.ctypes.data], [target.nbytes])
        plan = cpattn.transfer.TransferPlan(
            [source.ctypes.data], [target.ctypes.data], [source.nbytes]
        )
        plan.execute(sender, receiver.session_id)
    np.testing.assert_array_equal(target, source)


def main(wanted: list[str]) -> None:
    is_installed()
    there = cpattn.supported_isas()
    missing = sorted(set(wanted) - set(there))
    assert not missing, f"The wheel lacks {missing}: it has {there}"
    for isa in there:
        cpattn._core.set_isa(isa)
        assert cpattn.active_isa() == isa
        for dtype in (np.float32, np.float16):
            attend([33, 5], [80, 5], dtype)
            attend([1, 1, 1], [100, 33, 1], dtype)
        index()
    plan()
    move()
    print(f"cpattn {cpattn.__version__} ({cpattn._core.__compiler__}): {' '.join(there)}: right")


if __name__ == "__main__":
    main(sys.argv[1].split(",") if sys.argv[1:] else [])
