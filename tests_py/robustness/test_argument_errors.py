# SPDX-License-Identifier: Apache-2.0
"""Any wrong argument gives an error that names function and argument, and nothing is written."""

import inspect
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import cpattn
from support.api.api_calls import TRANSFERS
from support.api.api_fuzz_rules import Case, check_error
from support.api.argument_kinds import NOTHING, Call, Target, fresh, in_torch
from support.api.argument_sweep import CALLS

LONGEST = 400  # characters in a message
NAME = operator.attrgetter("name")


def test_every_argument_is_swept():
    """The calls of a function together sweep all of its arguments."""
    swept = {}
    for call in CALLS:
        if call.name != "set_num_threads":  # a builtin has no signature
            swept.setdefault(call.function, set()).update(call.arguments)
    for function, named in swept.items():
        assert named == {*inspect.signature(function).parameters}


def contents(values: dict[str, Any]) -> dict[str, bytes]:
    return {
        name: value.tobytes()
        for name, value in values.items()
        if isinstance(value, np.ndarray) and value.dtype != object
    }


def copied(call: Call) -> dict[str, Any]:
    return {name: fresh(value) for name, value in call.values().items()}


def described(bad: object) -> str:
    if isinstance(bad, np.ndarray):
        return f"{type(bad).__name__} {bad.dtype} {bad.shape}"
    return f"{type(bad).__name__} {bad!r:.40}" if type(bad).__repr__ is not object.__repr__ else ""


def faults(call: Call) -> Iterator[str]:
    """Yield the faults of a function in its treatment of wrong arguments."""
    for argument, bad in call.wrong():
        values = copied(call) | {argument: bad}
        before = contents(values)
        try:
            call.function(**values)
        except (TypeError, ValueError) as error:
            message = str(error)
            if not (message.startswith(call.name) and argument in message):
                yield f"{argument} = {described(bad)}: does not name both: {message[:LONGEST]}"
            if len(message) > LONGEST:
                yield f"{argument} = {described(bad)}: a message of {len(message)} characters"
        except Exception as error:
            yield f"{argument} = {described(bad)}: {error!r:.200}"
        else:
            yield f"{argument} = {described(bad)}: accepted"
        if contents(values) != before:
            yield f"{argument} = {described(bad)}: written before it was refused"


@pytest.mark.filterwarnings("ignore")  # torch warns of unusual tensors
@pytest.mark.parametrize("call", CALLS, ids=NAME)
def test_wrong_arguments_are_refused_by_name(call):
    num_threads = cpattn._core.default_num_threads()
    try:
        call.function(**copied(call))  # good arguments are taken
        assert list(faults(call)) == []
    finally:
        cpattn.set_num_threads(num_threads)


# These arguments of transfers, pools and plans take some values that are wrong for their kind.
LENIENT = {
    "fill_kv_args": ("kv_args",),  # they may be anything with attributes
    "setup_state_kv_args": ("kv_args", "pool"),
    "TransferPlan": ("parts",),  # a plan may have none
    "KVLayout": ("entries",),
    # Lists may be empty, and the rank of a group of one is ignored.
    "plan_send_state": ("dst_state_item_lens", "dst_state_layer_ids", "kv_shard_rank"),
    "pack_int_lists": ("lists",),
    "LocalEngine.write": ("session",),  # a peer may be absent
    "set_kv_buffer": ("k_scale", "v_scale"),  # rows without codes need none
    "ContextParallel.plan": ("block_tables", "custom_mask"),
    "ContextParallel.plan_decode": ("kv_lens", "block_tables", "q_lens", "custom_mask"),
}


def is_of_another_type(kind: str, bad: Any) -> bool:
    """Return whether the type, not the value, is wrong for an argument of this kind."""
    kind = kind.removeprefix("?")
    if any(bad is value for value in NOTHING):
        return kind != "value"
    is_too_large = isinstance(bad, int) and bad > 2**64
    is_another_word = kind == "text" and isinstance(bad, str)
    return kind in ("int", "flag", "text", "float") and not (is_too_large or is_another_word)


def fault_of(target: Target, argument: str, bad: Any) -> str | None:
    """Return the fault of a new call in its treatment of a wrong argument."""
    call = target.make()
    values = copied(call) | {argument: bad}
    before = contents(values)
    try:
        call.function(**values)
    except Exception as error:
        of_type = is_of_another_type(call.arguments[argument][0], bad)
        if of_type and not isinstance(error, TypeError):
            return f"no TypeError: {error!r:.200}"
        fault = check_error(Case(target, call, values, [argument], []), error)
        return fault or (None if contents(values) == before else "written before it was refused")
    finally:
        call.close()
    return None if argument in LENIENT.get(target.name, ()) else "accepted"


@pytest.mark.filterwarnings("ignore")  # torch warns of unusual tensors
@pytest.mark.parametrize("name", TRANSFERS)
def test_wrong_arguments_of_transfers_pools_and_plans_are_refused_by_name(name):
    """A value of another type raises a TypeError."""
    target = Target(name.partition("#")[0], TRANSFERS[name])
    good = target.make()
    wrong = [(argument, bad, fault_of(target, argument, bad)) for argument, bad in good.wrong()]
    good.close()
    assert [
        f"{argument} = {described(bad)}: {fault}" for argument, bad, fault in wrong if fault
    ] == []


def parts_of(result: Any) -> list[Any]:
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [part for part in parts if isinstance(part, (np.ndarray, torch.Tensor))]


def bytes_of(part: Any) -> bytes:
    part = part.contiguous().view(torch.uint8).numpy() if torch.is_tensor(part) else part
    return part.tobytes()


PLANS_OF_ROWS = ("plan_halo", "plan_pending", "plan_relayout", "plan_units")


@pytest.mark.parametrize("call", [c for c in CALLS if c.name != "set_num_threads"], ids=NAME)
def test_results_are_in_the_container_of_the_tensors(call):
    """NumPy and torch give the same bytes, also in `out`; oracles and halos give arrays."""
    values = copied(call)
    arrays = parts_of(call.function(**values))
    assert "out" not in values or arrays[0] is values["out"]
    tensors = parts_of(call.function(**{k: in_torch(v) for k, v in copied(call).items()}))
    assert all(isinstance(array, np.ndarray) for array in arrays)
    gives_arrays = call.name.startswith(("reference.", *PLANS_OF_ROWS))
    assert gives_arrays or all(map(torch.is_tensor, tensors))
    assert list(map(bytes_of, arrays)) == list(map(bytes_of, tensors))


def attention(**changes: Any) -> Any:
    q, cache = np.ones((3, 2, 16), np.float32), np.ones((4, 8, 1, 16), np.float32)
    batch = {"q_lens": [3], "kv_lens": [10], "block_tables": [[2, 0]]}
    return cpattn.paged_attention(q, cache, cache, **batch | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": np.float32(0.25)}, {"scale": np.float64(0.25)}, {"scale": np.array(0.25)},
        {"scale": 1}, {"scale": np.int8(1)}, {"softcap": 0}, {"window": np.int16(5)},
        {"causal": np.True_}, {"num_threads": np.uint64(1)}, {"page_size": np.int64(8)},
        {"q_lens": [np.int32(3)]}, {"q_lens": (3,)}, {"block_tables": [np.array([2, 0])]},
    ],
)  # fmt: skip
def test_scalars_of_numpy_are_taken(changes):
    assert attention(**changes).shape == (3, 2, 16)


def test_numbers_of_many_digits_are_not_printed():
    with pytest.raises(ValueError, match="q_lens must fit into int64, got a number of 16610 bits"):
        attention(q_lens=[10**5000])
    with pytest.raises(ValueError, match=f"^paged_attention: window must .* got {2**70}$"):
        attention(window=2**70)
