# SPDX-License-Identifier: Apache-2.0
"""paged_attention takes tensors, tables and masks in different containers and forms."""

import numpy as np
import pytest
import torch

import cpattn
from support.attention_cases import DEFAULT, plan_of, run
from support.cases import Case, assert_attention, dense, make_inputs, packed


def test_csr_tables_say_the_same():
    inputs = make_inputs(DEFAULT.with_(q_lens=(3, 1, 2), kv_lens=(37, 0, 32)))
    counts = [3, 0, 2]
    csr = {name: value for name, value in inputs.items() if name not in ("kv_lens", "block_tables")}
    csr |= {
        "kv_indptr": np.cumsum([0, *counts]),
        "kv_indices": np.concatenate(
            [row[:n] for row, n in zip(inputs["block_tables"], counts, strict=True)]
        ),
        "last_page_len": [5, 0, 16],
    }
    assert all(map(torch.equal, run(csr), run(inputs)))


class ExportsCopies:
    """An array that exports copies through DLPack; each lives only as long as its export."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self):
        return self.array.copy().__dlpack__()


def test_exported_arrays_are_held_during_the_call():
    q, cache = np.ones((2, 1, 16), np.float32), np.ones((4, 8, 1, 16), np.float32)
    # This is so large that its memory returns to the system at once: later reads would crash.
    block_tables = ExportsCopies(np.full((2, 1_000_000), 3))
    lens = {"q_lens": ExportsCopies(np.array([1, 1])), "kv_lens": ExportsCopies(np.array([5, 5]))}
    out = cpattn.paged_attention(q, cache, cache, block_tables=block_tables, **lens)
    np.testing.assert_array_equal(out, q)


def test_given_outputs_are_filled_and_returned():
    inputs = make_inputs(DEFAULT)
    expected_out, expected_lse = run(inputs)
    out = torch.full((8, 4, 100), torch.nan)[..., 20:84]  # strided: gaps between heads
    lse = torch.full((6, 8), torch.nan)[1:5].T
    result_out, result_lse = run(inputs, out=out, lse=lse)
    assert result_out is out
    assert result_lse is lse
    assert torch.equal(out, expected_out)
    assert torch.equal(lse, expected_lse)
    assert torch.equal(cpattn.paged_attention(**inputs), expected_out)


def test_query_rows_far_apart(tmp_path):
    """Rows may be 2^30 elements apart, as in this sparse file."""
    inputs = make_inputs(DEFAULT.with_(q_lens=(3,), kv_lens=(20,), dtype="float16"))
    rows = np.memmap(tmp_path / "q", dtype=np.float16, mode="w+", shape=(3, 2**30))
    q = torch.from_numpy(rows)[:, : 4 * 64].unflatten(1, (4, 64))
    q.copy_(inputs["q"])
    assert_attention(*cpattn.paged_attention(**inputs | {"q": q}, return_lse=True), inputs)


CASE = Case(q_lens=(5, 1, 0, 19, 33), kv_lens=(25, 4, 9, 52, 1100))


def random_masks(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.random(shape) < 0.4 for shape in zip(CASE.q_lens, CASE.kv_lens, strict=True)]


def inputs_of(case=CASE):
    """Make inputs without NaN in caches, since keys behind a mask may be read."""
    inputs = make_inputs(case)
    return inputs | {name: inputs[name].nan_to_num() for name in ("k_cache", "v_cache")}


def test_bits_behind_the_last_one_of_a_sequence_do_not_matter():
    masks = random_masks(1)
    bits = packed(masks)
    unused = packed([np.zeros_like(mask) for mask in masks])
    end = 0
    for mask in masks:
        end += -(-mask.size // 8)
        if mask.size % 8:
            unused[end - 1] = 0xFF << mask.size % 8 & 0xFF
    assert unused.any()
    expected, result = (
        cpattn.paged_attention(**inputs_of(), packed_custom_mask=x) for x in (bits, bits | unused)
    )
    assert torch.equal(expected, result)


def test_a_plan_of_bits_is_that_of_bools():
    masks = random_masks(2)
    bools = plan_of(inputs_of(), custom_mask=dense(masks))
    bits = plan_of(inputs_of(), packed_custom_mask=packed(masks))
    assert bools == bits
    assert bits != plan_of(inputs_of())


SIZE = sum(q * kv for q, kv in zip(CASE.q_lens, CASE.kv_lens, strict=True))
BYTES = len(packed(random_masks(0)))


def bits_of(count, dtype=np.uint8, step=1):
    return {"packed_custom_mask": np.ones(count, dtype)[::step]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (bits_of(BYTES + 1), rf"packed_custom_mask must .* = {BYTES} bytes, got {BYTES + 1}"),
        (bits_of(3), "packed_custom_mask .*more bytes, got 3"),
        (bits_of(BYTES, bool), "packed_custom_mask must .*uint8, got bool"),
        (bits_of(2 * BYTES, step=2), "packed_custom_mask must be contiguous"),
        (bits_of(BYTES) | {"custom_mask": np.ones(SIZE, bool)}, "give either .* got both"),
    ],
)
def test_value_errors(change, message):
    with pytest.raises(ValueError, match=f"paged_attention: {message}"):
        cpattn.paged_attention(**inputs_of(), **change)
