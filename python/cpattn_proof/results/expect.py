# SPDX-License-Identifier: Apache-2.0
"""Results of a context-parallel program, given by every rank for a comparison with float64."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..conformance.numbers import EPS, Array
from ..findings import Finding, NotUsable, Report
from .judgement import judge
from .rows import Record


def _decided(findings: list[Finding]) -> tuple[str, ...]:
    """Return the invariants that results decide; only OWN if rows have no single owner."""
    return ("OWN",) if any(one.kind == "own-token" for one in findings) else ("OWN", "COV", "LSE")


class Collector:
    """Collects the results of simulated ranks until all have run.

    Parameters
    ----------
    rank : callable
        Returns the running rank.
    size : int
        Number of ranks.
    """

    def __init__(self, rank: Callable[[], int], size: int) -> None:
        self._rank = rank
        self._calls: list[list[Record]] = [[] for _ in range(size)]
        self.decided: tuple[str, ...] = ()

    def add(self, record: Record) -> None:
        self._calls[self._rank()].append(record)

    @property
    def is_used(self) -> bool:
        """Whether any rank has called `expect`."""
        return any(self._calls)

    def findings(self) -> list[Finding]:
        """Judge the calls in turn, up to the first wrong one."""
        counts = [len(calls) for calls in self._calls]
        if len(set(counts)) > 1:
            raise NotUsable(
                f"expect: every rank must call it equally often, got {counts} calls of ranks 0 to "
                f"{len(counts) - 1}"
            )
        found: list[Finding] = []
        for records in zip(*self._calls, strict=True):
            found = found or judge(records)
        self.decided = _decided(found) if self.is_used else ()
        return found


_collector: Collector | None = None


@contextlib.contextmanager
def collecting(collector: Collector) -> Iterator[None]:
    """Send results of `expect` to a collector while the context lasts."""
    global _collector
    _collector = collector
    try:
        yield
    finally:
        _collector = None


def expect(
    out: Any,
    q: Any,
    k: Any,
    v: Any,
    positions: Any,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    lse: Any = None,
    sequences: Any = None,
    key_positions: Any = None,
    key_sequences: Any = None,
    group: Any = None,
) -> Report | None:
    """Compare the results of all ranks with attention over whole sequences in float64.

    Every rank calls it with its own rows, before or after communication; positions join the rows of
    all ranks. Under `simulate`, the comparison follows when all ranks have run, and a fault is a
    finding of its report. Under a launcher such as torchrun, it happens here, over the process
    group.

    Parameters
    ----------
    out : tensor [rows, num_heads, v_head_dim], or [batch, rows, num_heads, v_head_dim]
        Results of the program for the rows of `q`.
    q, k, v : tensors [rows, heads, head_dim], or with a batch in front
        The rank's rows of queries, keys and values; queries and keys may differ in rows and heads.
        Each element of a batch is a sequence.
    positions : ints [rows]
        Position of each row of `q` in its sequence; -1 for padding, which is ignored. Queries may
        be the last tokens of a sequence, or all.
    causal : bool
        Whether a query sees only keys up to its own position.
    window : int, optional
        Number of visible keys before a query's own; default: all.
    scale : float, optional
        Factor of the scores; default: 1 / sqrt(head_dim).
    softcap : float
        Scores are ``softcap * tanh(score / softcap)``; 0 for none.
    sinks : tensor [num_heads], optional
        An extra score for each head, without a value.
    lse : tensor [rows, num_heads], optional
        Natural log-sum-exp without sinks, to compare as well.
    sequences : ints [rows], optional
        Sequence of each row, if there is no batch; default: one sequence.
    key_positions, key_sequences : ints, optional
        Positions and sequences of the rows of `k`; default: those of `q`.
    group : process group, optional
        Ranks under a launcher; default: all.

    Returns
    -------
    Report or None
        Report of the comparison; None under `simulate`, whose report includes it.

    Raises
    ------
    AssertionError
        If the results are wrong, under a launcher, on every rank. The text is that of the report.
    NotUsable
        If shapes or options do not fit together, on a rank or between ranks.

    Examples
    --------
    >>> import torch
    >>> from cpattn_proof import expect
    >>> q, k, v = torch.randn(3, 5, 2, 16, generator=torch.Generator().manual_seed(0))
    >>> scores = torch.einsum("qhd,khd->hqk", q, k) / 4
    >>> seen = torch.ones(5, 5, dtype=torch.bool).tril()
    >>> weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    >>> out = torch.einsum("hqk,khd->qhd", weights, v)
    >>> expect(out, q, k, v, range(5)).verdict
    'proved'
    >>> try:
    ...     expect(out.flip(0), q, k, v, range(5))
    ... except AssertionError as error:
    ...     print(str(error).partition(":")[0])
    COV unknown
    """
    q_rows, batch = _rows("q", q)
    shapes = [_rows(name, value)[0] for name, value in (("out", out), ("k", k), ("v", v))]
    places = _places("positions", positions, sequences, len(q_rows), batch)
    if key_positions is None and len(shapes[1]) == len(q_rows):
        key_places = places
    else:
        key_places = _places("key_positions", key_positions, key_sequences, len(shapes[1]), batch)
    _check_shapes(q_rows, *shapes)
    out_rows, k_rows, v_rows = shapes
    record = Record(
        site=_site(), out=out_rows, q=q_rows, k=k_rows, v=v_rows,
        lse=None if lse is None else _like("lse", lse, q_rows.shape[:2]),
        sinks=None if sinks is None else _like("sinks", sinks, q_rows.shape[1:2]),
        places=places, key_places=key_places, dtype=_dtype(q),
        options={
            "causal": bool(causal), "window": None if window is None else int(window),
            "scale": float(q_rows.shape[2] ** -0.5 if scale is None else scale),
            "softcap": float(softcap),
        },
    )  # fmt: skip
    if _collector is not None:
        _collector.add(record)
        return None
    report = _over(group, record)
    if report.findings:
        raise AssertionError(report.text())
    return report


def _over(group: Any, record: Record) -> Report:
    """Gather over the process group, if there is one, and judge on its first rank."""
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    size = (
        dist.get_world_size(group) if dist and dist.is_available() and dist.is_initialized() else 1
    )
    if dist is None or size == 1:
        return _report([record])
    records: list[Any] = [None] * size
    dist.all_gather_object(records, record, group=group)
    told: list[Any] = [None] * size
    mine: Report | NotUsable | None = None
    if dist.get_rank(group) == 0:
        try:
            mine = _report(records)
        except NotUsable as error:
            mine = error
    dist.all_gather_object(told, mine, group=group)
    report: Report | NotUsable = told[0]
    if isinstance(report, NotUsable):
        raise report
    return report


def _report(records: list[Record]) -> Report:
    found = judge(records)
    return Report(
        "expect", records[0].site, tuple(found), _decided(found), facts={"ranks": len(records)}
    )


def _array(name: str, value: Any) -> Array:
    """Return the numbers of a tensor on any device, or of any object that NumPy reads."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float().numpy() if value.is_floating_point() else value.numpy()
    try:
        array = np.array(value)  # a copy, as the program goes on
    except Exception as error:
        raise NotUsable(f"expect: {name} must be a tensor, got {type(value).__name__}") from error
    return array


def _rows(name: str, value: Any) -> tuple[Array, int | None]:
    """Return [rows, heads, dim], and the size of a leading batch axis."""
    array = _array(name, value)
    if array.ndim not in (3, 4) or array.dtype.kind != "f":
        raise NotUsable(
            f"expect: {name} must be floats [rows, heads, dim], or with a batch in front, got "
            f"{array.dtype} {list(array.shape)}"
        )
    batch = array.shape[0] if array.ndim == 4 else None
    return array.astype(np.float32).reshape(-1, *array.shape[-2:]), batch


def _like(name: str, value: Any, shape: tuple[int, ...]) -> Array:
    array = _array(name, value).astype(np.float32)
    if array.size != np.prod(shape) or array.shape[-1:] != shape[-1:]:
        raise NotUsable(f"expect: {name} must be {list(shape)}, got {list(array.shape)}")
    return array.reshape(shape)


def _places(name: str, positions: Any, sequences: Any, rows: int, batch: int | None) -> Array:
    """Return sequence and position of each row."""
    if positions is None:
        raise NotUsable(f"expect: {name} must be given where q and k have other rows, got {rows}")
    given = _array(name, list(positions) if isinstance(positions, range) else positions).reshape(-1)
    each = rows // (batch or 1)
    if given.dtype.kind not in "iu" or len(given) not in (each, rows):
        raise NotUsable(
            f"expect: {name} must be {each} ints, one for each row, got {given.dtype} "
            f"{list(given.shape)}"
        )
    if batch is not None and sequences is not None:
        raise NotUsable("expect: sequences must be left out with a batch, whose elements they are")
    of = np.repeat(np.arange(batch or 1), each)
    if sequences is not None:
        of = _array(name.replace("positions", "sequences"), sequences).reshape(-1)
        if of.dtype.kind not in "iu" or len(of) != rows:
            raise NotUsable(f"expect: sequences must be {rows} ints, one for each row")
    return np.stack([of, np.resize(given, rows)], axis=1).astype(np.int64)


def _check_shapes(q: Array, out: Array, k: Array, v: Array) -> None:
    for rule, holds in (
        ("out must have the rows and heads of q", out.shape[:2] == q.shape[:2]),
        ("v must have the rows and heads of k", v.shape[:2] == k.shape[:2]),
        ("k must have the head_dim of q", k.shape[2] == q.shape[2]),
        ("out must have the head_dim of v", out.shape[2] == v.shape[2]),
        ("heads of q must be a multiple of those of k", q.shape[1] % max(k.shape[1], 1) == 0),
    ):
        if not holds:
            shapes = ", ".join(str(list(x.shape)) for x in (out, q, k, v))
            raise NotUsable(f"expect: {rule}, got out, q, k and v of {shapes}")


def _dtype(q: Any) -> str:
    name = str(q.dtype).removeprefix("torch.")
    return name if name in EPS else "float32"


def _site() -> str:
    """Return the line that called `expect`."""
    frame = sys._getframe(2)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
