# SPDX-License-Identifier: Apache-2.0
"""Random calls of every public callable, mostly valid ones with something hostile in them.

They return, or raise what `api_fuzz_rules` allows, and write to nothing of the caller's. Calls run
in forked children, in batches; seed and number determine a call.
"""

import argparse
import contextlib
import faulthandler
import io
import mmap
import os
import pickle
import random
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

os.environ.setdefault("MALLOC_PERTURB_", "128")  # glibc fills new memory with 3.4e38, not zeros

import ml_dtypes
import numpy as np
import torch

import cpattn
from support.api.api_calls import targets
from support.api.api_fuzz_rules import LARGE, MOST_SCALE, Case, check_error, has_garbage, ordinary
from support.api.argument_kinds import Target, fresh, in_torch
from support.api.hostile_values import Draw, hostile

SECONDS = 10  # limit for a call: all of them are small
MEMORY = 3 << 30  # limit for a child, beyond its memory at the start
BATCH = 1000


@cache
def all_targets() -> list[Target]:
    return list(targets())


def make_case(seed: int, number: int) -> Case:
    draw = random.Random(f"{seed}/{number}")
    target = draw.choice(all_targets())
    good = target.make()
    kinds = {name: kind for name, (kind, _) in good.arguments.items()}
    values = {name: fresh(value) for name, (_, value) in good.arguments.items()}
    owned = [value for value in values.values() if isinstance(value, np.ndarray)]
    for name, kind in kinds.items():  # a caller may pass None, too
        if kind.startswith("?") and draw.random() < 0.3:
            values[name] = None
    if draw.random() < 0.25:
        values = in_another_dtype(draw, values)
    if draw.random() < 0.3:
        values = {name: in_torch(value) for name, value in values.items()}
    owned += [value for value in values.values() if isinstance(value, (np.ndarray, torch.Tensor))]
    count = draw.choices([0, 1, 2, 3], [15, 55, 20, 10])[0]
    changed = draw.sample(sorted(values), min(count, len(values)))
    for name in changed:
        if kinds[name] == "?output" or draw.random() < 0.1:
            overlapping = overlap(draw, values, name)
            if overlapping is not None:
                values[name] = overlapping
                continue
        values[name] = hostile(draw, kinds[name], good.arguments[name][1])
        owned.append(values[name])
    if draw.randrange(50) == 0:
        name = draw.choice(["nonsense", *values]) if values else "nonsense"
        changed.append(name)
        values[name] = 1
    return Case(target, good, values, changed, owned)


def in_another_dtype(draw: Draw, values: dict[str, Any]) -> dict[str, Any]:
    """Convert all float32 tensors to one other dtype."""
    dtype = draw.choice([np.float16, ml_dtypes.bfloat16, np.float64])
    return {
        name: value.astype(dtype)
        if isinstance(value, np.ndarray) and value.dtype == np.float32
        else value
        for name, value in values.items()
    }


def overlap(draw: Draw, values: dict[str, Any], name: str) -> Any:
    """Return a view of another argument's memory in this one's shape and dtype, or None."""
    mine = values[name]
    others = [
        value
        for other, value in values.items()
        if other != name
        and type(value) is np.ndarray
        and value.flags.c_contiguous
        and not value.dtype.hasobject
    ]
    if not isinstance(mine, np.ndarray) or mine.dtype.hasobject or not others:
        return None
    memory = draw.choice(others).reshape(-1).view(np.uint8)
    first = draw.choice([0, 0, mine.itemsize])
    if len(memory) < first + mine.nbytes:
        return None
    return memory[first : first + mine.nbytes].view(mine.dtype).reshape(mine.shape)


def buffers(values: Any) -> Iterator[Any]:
    """Yield the memory of everything that the caller owns."""
    for value in values:
        with contextlib.suppress(Exception):  # a hostile value owns nothing
            if isinstance(value, torch.Tensor):
                if value.layout is torch.strided and not value.is_meta and not value.is_nested:
                    yield torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).numpy()
            elif isinstance(value, np.ndarray):
                while isinstance(value.base, np.ndarray):
                    value = value.base
                if value.dtype != object and value.nbytes <= LARGE:
                    yield value


def contents(values: Any) -> list[bytes]:
    return [buffer.tobytes() for buffer in buffers(values) if buffer.nbytes <= LARGE]


def run_case(seed: int, number: int) -> tuple[Target, str | None]:
    """Run a call; return its target, and the fault or None."""
    case = make_case(seed, number)
    values = case.arguments
    owned = [*case.owned, *values.values()]
    before = contents(owned)
    # The last bits of float32 scores decide between weights 0 and 1 if the scale is in millions.
    huge = any(
        name.endswith("scale") and isinstance(value, (int, float)) and abs(value) > MOST_SCALE
        for name, value in values.items()
    )
    usual = case.target.judged and not huge and ordinary(list(values.values()))
    try:
        with np.errstate(all="ignore"):
            result = case.good.function(**values)
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:
        fault = check_error(case, error)
        if fault is None and contents(owned) != before:
            fault = f"written to before it was refused with {error!r:.200}"
    else:
        fault = "garbage in a result of ordinary numbers" if usual and has_garbage(result) else None
        del result
    finally:
        case.good.close()
        cpattn.set_num_threads(1)
    return case.target, fault


def described(value: Any) -> str:
    """Return the repr of a value that may refuse one."""
    try:
        text = repr(value)
        if isinstance(value, np.ndarray):
            return f"{value.dtype} {value.shape} strides {value.strides}: {text}"
        if isinstance(value, torch.Tensor):
            return f"{value.dtype} {tuple(value.shape)}: {text}"
    except Exception as error:
        return f"<{type(value).__name__}, of which one learns no more than {error!r:.100}>"
    return text


def describe(seed: int, number: int) -> str:
    """Describe the call and its arguments; changed ones are marked."""
    case = make_case(seed, number)
    lines = [f"{case.target.name}  (changed: {', '.join(case.changed) or 'nothing'})"]
    for name, value in case.arguments.items():
        mark = "*" if name in case.changed else " "
        lines.append(f" {mark} {name} = {described(value):.400}")
    return "\n".join(lines)


@dataclass
class Finding:
    number: int
    name: str
    fault: str


@dataclass
class Result:
    findings: list[Finding]
    counts: Counter[str]


def run_batch(seed: int, numbers: range, cells: np.ndarray, pipe: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.disable()  # the parent reports the call
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    warnings.simplefilter("ignore")
    with open(pipe, "wb") as out, open(os.devnull, "w") as sys.stderr:
        for number in numbers:
            cells[0] = number
            try:
                target, fault = run_case(seed, number)
                name = target.name
                cells[1 + all_targets().index(target)] += 1
            except MemoryError:  # the arguments themselves did not fit
                continue
            except Exception:
                name, fault = "the fuzzer itself", traceback.format_exc()[-1500:]
            if fault is not None:
                pickle.dump((number, name, fault), out)
                out.flush()


def run(seed: int, calls: int) -> Result:
    """Run all calls of a seed; return the findings, and how often each function was called."""
    cpattn.set_num_threads(1)
    # Children write here the number of the running call, and how often each target ran.
    cells = np.frombuffer(mmap.mmap(-1, 8 * (1 + len(all_targets()))), np.int64)
    findings: list[Finding] = []
    number = 0
    with contextlib.suppress(KeyboardInterrupt):  # then report the findings so far
        while number < calls:
            found, number = run_child(seed, range(number, min(calls, number + BATCH)), cells)
            findings += found
    counts: Counter[str] = Counter()
    for target, count in zip(all_targets(), cells[1:].tolist(), strict=True):
        counts[target.name] += count
    return Result(findings, counts)


def run_child(seed: int, numbers: range, cells: np.ndarray) -> tuple[list[Finding], int]:
    """Return findings of calls, and the next call: a call that ended the child is the last."""
    cells[0] = numbers.start
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            run_batch(seed, numbers, cells, writer)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    received = b""
    last, since, hangs = -1, time.monotonic(), False
    with open(reader, "rb", buffering=0) as pipe:
        while not hangs:
            if select.select([pipe], [], [], 0.5)[0]:
                part = pipe.read(1 << 16)
                if not part:
                    break
                received += part
            elif cells[0] != last:
                last, since = cells[0], time.monotonic()
            elif time.monotonic() - since > SECONDS:
                hangs = True
                os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    findings = []
    stream = io.BytesIO(received)
    while stream.tell() < len(received):
        findings.append(Finding(*pickle.load(stream)))
    if not hangs and status == 0:
        return findings, numbers.stop
    how = f"hangs for {SECONDS} s" if hangs else f"ends the process, wait status {status}"
    current = int(cells[0])
    findings.append(Finding(current, make_case(seed, current).target.name, how))
    return findings, current + 1


def report(seed: int, findings: list[Finding], most: int = 3) -> str:
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.name, finding.fault[:60]), []).append(finding)
    lines = [f"{len(findings)} findings of {len(groups)} kinds, seed {seed}"]
    for (name, _), group in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"\n{name}, {len(group)} times: {group[0].fault}")
        for finding in group[:most]:
            lines.append(f"  python -m support.api.api_fuzz --seed {seed} --only {finding.number}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of the only call, run in this process")
    options = parser.parse_args()
    if options.only is not None:
        cpattn.set_num_threads(1)
        print(describe(options.seed, options.only), flush=True)
        print(run_case(options.seed, options.only)[1] or "nothing wrong")
        return 0
    result = run(options.seed, options.calls)
    print(report(options.seed, result.findings))
    print(f"{result.counts.total():,} calls of {len(result.counts)} functions")
    return 1 if result.findings else 0


if __name__ == "__main__":
    sys.exit(main())
