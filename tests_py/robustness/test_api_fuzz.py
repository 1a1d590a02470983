# SPDX-License-Identifier: Apache-2.0
"""Random calls of the whole public interface find no fault, and the fuzzer sees planted ones.
Parsers read each input that fuzzing has kept, and raise nothing but their own errors."""

import importlib
import inspect
import os
import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cpattn import distributed, reference
from support.api import api_fuzz
from support.api.argument_kinds import Call, Target
from support.engine_runs import run_module
from support.places import TESTS
from support.public_names import PUBLIC, PUBLIC_MODULES
from support.time_limits import PATIENCE

CALLS = 10_000

# These public names are no targets, for these reasons.
VALUES = {  # only functions make them
    "AttentionPlan", "ContextParallelMetadata", "DsaMetadata", "PCPLayout", "Registration",
    "ShardGatherPlan",
}  # fmt: skip
RECORDS = {  # they hold their arguments, and check nothing
    "DecodeTargets", "HeadSlice", "KVArgs", "KVChunk", "KVEntry", "KVLink", "KVLinks",
    "HaloPlan", "KVSendIndices", "PullTargets", "RankSegments", "RelayoutPlan", "SelectedBlocks",
    "ContextParallelPlan", "DecodePlan", "ExchangeChoice", "KVRegistration", "KVTransferRequest",
    "LayerCaches", "Profile", "ScopeTime", "ShardedPlan", "Thread", "Topology", "TransferError",
    "TransferStatus", "KVDigest", "KVHandshakeError", "KVMismatch",
}  # fmt: skip
ENUMS = {"ForwardMode", "TopkTransformMethod", "TraceScope"}
PROTOCOLS = {"Placement", "TransferEngine"}
# They need a group of torch.distributed; the planner is among the targets.
NEEDS_A_GROUP = {"ContextParallel", "Prefetch", "SharedMemory"}
WITHOUT_ARGUMENTS = {"active_isa", "supported_isas"}
REFUSES_LATER = {"num_threads"}  # it refuses when entered
EXEMPT = VALUES | RECORDS | ENUMS | PROTOCOLS | NEEDS_A_GROUP | WITHOUT_ARGUMENTS | REFUSES_LATER


@pytest.mark.parametrize("module", [*PUBLIC_MODULES, reference, distributed])
def test_every_public_callable_is_a_target(module: ModuleType) -> None:
    called = set()
    for target in api_fuzz.all_targets():
        called |= {target.name, getattr(target.make().function, "__name__", "")}
    public = {name: getattr(module, name) for name in module.__all__}
    missing = {
        name
        for name, value in public.items()
        if callable(value) and not {name, getattr(value, "__name__", name)} & (called | EXEMPT)
    }
    assert missing == set()


def test_every_method_of_public_classes_is_a_target() -> None:
    called = {target.make().function.__qualname__ for target in api_fuzz.all_targets()}
    missing = set()
    for name, kind in PUBLIC.items():
        if not inspect.isclass(kind) or name in EXEMPT - {"KVChunk"}:
            continue
        for method in vars(kind):
            function = inspect.unwrap(getattr(kind, method))
            if method.startswith("_") or not inspect.isfunction(function):
                continue
            if len(inspect.signature(getattr(kind, method)).parameters) > 1:
                missing |= {function.__qualname__} - called
    assert missing == set()


def test_good_calls_succeed() -> None:
    for target in api_fuzz.all_targets():
        good = target.make()
        good.function(**{name: value for name, (_, value) in good.arguments.items()})
        good.close()


@pytest.mark.slow
def test_random_calls() -> None:
    """The seed is 1, or the value of CPATTN_FUZZ_SEED."""
    options = (f"--calls={CALLS}", f"--seed={os.environ.get('CPATTN_FUZZ_SEED', '1')}")
    printed = run_module(api_fuzz.__name__, *options, timeout=20 * PATIENCE)
    calls = re.search(r"([\d,]+) calls of", printed)
    assert calls is not None
    assert int(calls[1].replace(",", "")) > 0.95 * CALLS


def findings(monkeypatch: pytest.MonkeyPatch, function: Any, calls: int = 30) -> set[str]:
    """Return the faults that the fuzzer finds in a function with an argument `x`."""

    def make() -> Call:
        return Call(function, {"x": ("tensor", np.ones(4, np.float32))})

    monkeypatch.setattr(api_fuzz, "all_targets", lambda: [Target("fake", make)])
    monkeypatch.setattr(api_fuzz, "SECONDS", 1)
    result = api_fuzz.run(0, calls)
    assert result.counts["fake"] >= calls - len(result.findings)
    return {finding.fault for finding in result.findings}


def refuse(error: Exception, write: bool = False) -> Any:
    def function(x: Any = None, **_: Any) -> None:
        if write and isinstance(x, np.ndarray) and x.flags.writeable and x.dtype == np.float32:
            x[...] = 5
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (refuse(ValueError("fake: x must be another")), None),
        (refuse(ValueError("fake: x must be another"), write=True), "written to before"),
        (refuse(ValueError("x must be another")), "does not begin with the function's name"),
        (refuse(ValueError("fake: bad")), "names no argument"),
        (refuse(TypeError("fake: x must be another" + "!" * 2000)), "a message of 2023"),
        (refuse(OverflowError("fake: x is too large")), "an error that is not documented"),
        (lambda x=None, **_: np.full(3, np.nan), "garbage in a result"),
        pytest.param(
            lambda x=None, **_: os.kill(os.getpid(), 11),
            "ends the process, wait status 11",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_the_fuzzer_sees_what_is_wrong(monkeypatch, function, fault):
    found = findings(monkeypatch, function)
    if fault is None:
        assert found == set()
    else:
        assert any(text.startswith(fault) for text in found)


CORPORA = TESTS / "fuzz" / "corpus"
PARSERS = sorted(folder.name for folder in CORPORA.iterdir())


def test_every_target_has_a_corpus() -> None:
    modules = {path.stem for path in CORPORA.parent.glob("*.py")}
    assert modules - {"__init__", "__main__", "reader"} == set(PARSERS)


@pytest.mark.parametrize("name", PARSERS)
def test_corpus(name: str) -> None:
    target = importlib.import_module(f"fuzz.{name}")
    inputs = sorted((CORPORA / name).iterdir())
    assert inputs
    for path in inputs:
        target.run(path.read_bytes())
