# SPDX-License-Identifier: Apache-2.0
"""Runs the installed torch's own tests of process groups on simulated ranks: ``python -m
support.proof.torch_tests OUT.json`` writes the outcome of each."""

import json
import os
import re
import sys
import tempfile
import types
import unittest
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from cpattn_proof import NotUsable, simulate

SIZE, SMALL_SIZE = 8, 4
#: Tests that cannot run here: pattern of names, pattern of the error, reason.
LEFT_OUT: tuple[tuple[str, str, str], ...] = (
    ("^test_DistributedDataParallelCPU|^test_accumulate_gradients|^test_ddp_|^test_grads_same|"
     "^test_static_graph_api_cpu", "Could not find backend type",
     "`DistributedDataParallel` asks its group for a backend written in C++"),
    ("_profiler$", "torch has one profiler in a process", "every rank profiles"),
    ("^test_barrier_timeout|^test_monitored_barrier",
     "SEQ (rank-returned|other-kind|deadlock)|not been init",
     "waits for a timeout, which is refuted as the hang that it is"),
    ("_cuda(_complex)?$|^test_batch_isend_irecv_op_err$", "IndexError", "needs a GPU"),
    ("^test_get_rank$", "Scalars are not equal", "counts processes by their numbers"),
    ("^test_SyncBatchNorm_process_group$", "torchvision", "needs torchvision"),
    ("^test_sparse_all_reduce_sum$", "sparse_coo", "sparse tensors"),
)  # fmt: skip
#: Rows of the table: pattern of names, and what the tests try.
FAMILIES: tuple[tuple[str, str], ...] = (
    ("^test_(ddp|DistributedData|SyncBatch|static_graph|accumulate|grads_same)",
     "`DistributedDataParallel`"),
    ("^test_sparse_all_reduce|^test_all_reduce", "`all_reduce`, coalesced too: operators, dtypes"),
    ("^test_reduce_scatter", "`reduce_scatter`"),
    ("^test_reduce", "`reduce`"),
    ("^test_all_gather", "`all_gather`, coalesced, into one tensor, of objects"),
    ("^test_all_to_all", "`all_to_all`, `all_to_all_single` with equal and unequal splits"),
    ("^test_gather", "`gather`, of objects too"),
    ("^test_scatter", "`scatter`, of objects too"),
    ("^test_broadcast", "`broadcast`, of objects too"),
    ("^test_(barrier|monitored_barrier)", "`barrier`, `monitored_barrier`"),
    ("^test_(batch_)?(isend|irecv|send_recv)",
     "`send`, `recv`, `isend`, `irecv`, `batch_isend_irecv`, tags, any source"),
    ("^test_(new_subgroups|get_|destroy|Backend)", "groups, ranks, sizes, backends"),
    ("", "averagers, samplers, hooks, logging"),
)  # fmt: skip


def load() -> types.ModuleType:
    """Import the tests, which read the environment meanwhile."""
    folder = tempfile.mkdtemp()
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(SMALL_SIZE), TEMP_DIR=folder)
    for name in ("barrier", "test_dir"):
        (Path(folder) / name).mkdir()
    try:
        import expecttest  # noqa: F401 - which torch's TestCase derives from
    except ImportError:  # these tests do not use it
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def case_of(tests: types.ModuleType) -> type[unittest.TestCase]:
    """Return the tests as a class with the ranks of the simulation."""
    import torch.distributed as dist
    from torch.testing._internal.common_utils import TestCase

    class Case(tests.DistributedTest._DistTestBase, TestCase):
        rank = property(lambda self: dist.get_rank())
        world_size = property(lambda self: dist.get_world_size())

        def _barrier(self, *_: Any, **__: Any) -> None:
            """Meet the other ranks; torch's own function uses files of processes."""
            dist.barrier()

        def call_dist_op(  # torch's own uses the profiler, but a process has only one
            self, title: str, is_async: bool, op: Callable[..., Any], *args: Any,
            secondary_op_call: Any = None, expect_event: Any = None, profile_cuda: Any = None,
            tensor_shapes: Any = None, **kwargs: Any,
        ) -> None:  # fmt: skip
            works = [op(*args, **kwargs)]
            if secondary_op_call is not None:
                works.append(secondary_op_call())
            for work in works if is_async else ():
                work.wait()

    return Case


def outcome_of(case: type[unittest.TestCase], name: str, skips: Mapping[int, str]) -> str:
    """Return "passed", "skipped: why" by torch's own decorators, or "failed: why"."""
    for size in (SMALL_SIZE, SIZE):
        said = _on_ranks(case, name, size)
        why = said.removeprefix("exit ")
        if why == said:
            return said
        if "small world size" not in skips[int(why)]:
            return f"skipped: {skips[int(why)]}"
    return said


def _on_ranks(case: type[unittest.TestCase], name: str, size: int) -> str:
    import torch.distributed as dist

    ended: list[str] = []

    def program() -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        try:
            getattr(case(name), name)()
        except unittest.SkipTest as skip:
            ended.append(f"skipped: {skip}")
        except SystemExit as ending:
            ended.append(f"exit {ending.code}")
        if dist.is_initialized():
            dist.barrier()

    try:
        options = {"seeds": (1,), "time_limit": 120, "cuda_as_cpu": False}
        report = simulate(program, ranks=size, backend=None, **options)
    except NotUsable as error:
        return f"failed: {error}"
    if ended:
        return ended[0]
    return "passed" if report.proved else f"failed: {report.findings[0].text()}"


def reason_of(name: str, outcome: str) -> str | None:
    """Return why a test cannot run here, if it failed in the known way."""
    for names, message, why in LEFT_OUT:
        if re.search(names, name) and re.search(message, outcome):
            return why
    return None


def rows_of(outcomes: Mapping[str, str]) -> list[str]:
    """Return the table of the documents: passed, skipped and impossible tests of each family."""
    families: dict[str, list[str]] = {what: [] for _, what in FAMILIES}
    for name in outcomes:
        families[next(what for names, what in FAMILIES if re.search(names, name))].append(name)
    rows = []
    for what, names in families.items():
        passed = sum(outcomes[name] == "passed" for name in names)
        skipped = sum(outcomes[name].startswith("skipped") for name in names)
        whys = [reason_of(name, outcomes[name]) for name in names]
        left = [f"{whys.count(why)} ({why})" for why in dict.fromkeys(filter(None, whys))]
        rows.append(f"| {what} | {passed} | {skipped} | {', '.join(left) or '0'} |")
    return rows


def main(path: str) -> None:
    warnings.simplefilter("ignore")
    tests = load()
    case = case_of(tests)
    skips = {skip.exit_code: skip.message for skip in tests.TEST_SKIPS.values()}

    names = sorted(name for name in dir(case) if name.startswith("test_"))
    Path(path).write_text(json.dumps({name: outcome_of(case, name, skips) for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
