# SPDX-License-Identifier: Apache-2.0
"""Unchanged libraries run on simulated ranks: this one, ring-flash-attn, yunchang and DeepSpeed.

yunchang is read from its wheel, DeepSpeed from a folder that pip fills:

    pip download --no-deps yunchang==0.6.4 -d DIR
    pip install --no-deps --no-build-isolation -t DIR deepspeed==0.19.8 einops hjson py-cpuinfo

CPATTN_YUNCHANG and CPATTN_DEEPSPEED name DIR. If they are not set, installed packages are used.
DeepSpeed compiles a part of itself when it first meets a process group; that takes a minute.
"""

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cpattn import active_isa
from cpattn.distributed import ContextParallel
from cpattn.integrations import flash_attn
from cpattn.kv import TokenInterleave
from cpattn_proof import NotUsable, simulate
from support.cases import expected_attention
from support.distributed import ring_worker
from support.distributed.distributed_worker import run_world
from support.proof.gloo_worker import prefill, prefills, run_ring
from support.tolerances import Expected, assert_attended

HEADS, DIM, TOKENS = 8, 32, 64
_FOLDERS = {
    "yunchang": os.environ.get("CPATTN_YUNCHANG"),
    "deepspeed": os.environ.get("CPATTN_DEEPSPEED"),
}


def is_there(package: str) -> bool:
    if folder := _FOLDERS[package]:
        wheels = sorted(map(str, Path(folder).glob(f"{package}-*.whl")))
        sys.path.insert(0, (wheels or [folder])[0])
    return find_spec(package) is not None


@dataclass(frozen=True)
class Case:
    """Degrees of Ulysses and ring, a layout, and whether Ulysses takes ranks side by side."""

    ulysses: int
    ring: int
    layout: str
    causal: bool = True
    kv_heads: int = HEADS
    ulysses_low: bool = True

    @property
    def size(self) -> int:
        return self.ulysses * self.ring


#: Each rank has its outputs and the numbers of their tokens.
Answers = dict[int, tuple[torch.Tensor, torch.Tensor]]


def make_batch(kv_heads: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(kv_heads)
    return [
        torch.randn(1, TOKENS, heads, DIM, generator=random)
        for heads in (HEADS, kv_heads, kv_heads)
    ]


@cache
def expected_of(kv_heads: int, causal: bool = True) -> Expected:
    q, k, v = (x[0] for x in make_batch(kv_heads))
    lens = {"q_lens": [TOKENS], "kv_lens": [TOKENS], "page_size": 1, "causal": causal}
    tables = {"block_tables": torch.arange(TOKENS)[None].numpy()}
    return expected_attention({"q": q, "k_cache": k, "v_cache": v, **lens, **tables})


def by_yunchang(case: Case, answers: Answers) -> Callable[[], torch.Tensor]:
    """Return a program in which yunchang hands out tokens and computes its hybrid attention."""

    def program() -> torch.Tensor:
        import yunchang

        rank = dist.get_rank()
        yunchang.set_seq_parallel_pg(case.ulysses, case.ring, rank, case.size, case.ulysses_low)
        extract = yunchang.EXTRACT_FUNC_DICT[case.layout]
        sizes = {"world_size": case.size, "rd": case.ring, "ud": case.ulysses}
        q, k, v = (extract(x, rank, **sizes) for x in make_batch(case.kv_heads))
        rows = extract(torch.arange(TOKENS).view(1, -1, 1), rank, **sizes).flatten()
        layer = yunchang.LongContextAttention(ring_impl_type=case.layout)
        out = layer(q, k, v, causal=case.causal)[0]
        answers[rank] = out, rows
        return out

    return program


def by_deepspeed(kv_heads: int, answers: Answers) -> Callable[[], torch.Tensor]:
    """Return a program in which ranks have blocks of tokens and use DeepSpeed's attention."""

    def program() -> torch.Tensor:
        import deepspeed.comm
        from deepspeed.sequence.layer import DistributedAttention

        deepspeed.comm.init_distributed("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        q, k, v = (x.chunk(size, 1)[rank].contiguous() for x in make_batch(kv_heads))
        rows = torch.arange(TOKENS).chunk(size)[rank]
        out = DistributedAttention(_causal, dist.group.WORLD, 2, 1)(q, k, v, 0)[0]
        answers[rank] = out, rows
        return out

    return program


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flash_attn.flash_attn_func(q, k, v, causal=True)


needs_yunchang = pytest.mark.skipif(
    not is_there("yunchang"),
    reason="yunchang is not there: pip install --no-deps yunchang==0.6.4, "
    "or a folder with its wheel in CPATTN_YUNCHANG",
)
needs_deepspeed = pytest.mark.skipif(
    not is_there("deepspeed"),
    reason="DeepSpeed is not there: a folder with deepspeed, einops, hjson and py-cpuinfo in "
    "CPATTN_DEEPSPEED",
)

DEGREES = [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
CASES = [
    *(Case(*degrees, layout) for degrees in DEGREES for layout in ("basic", "zigzag", "strip")),
    *(Case(*degrees, "basic", causal=False) for degrees in DEGREES[:3]),
    *(Case(2, 2, layout, kv_heads=4) for layout in ("basic", "zigzag", "strip")),
    Case(2, 2, "zigzag", ulysses_low=False),
    Case(4, 2, "zigzag"),
    Case(2, 4, "zigzag", ulysses_low=False),
    Case(8, 1, "basic"),
]


@pytest.fixture
def on_kernels():
    """Make ``import flash_attn`` find our functions."""
    with flash_attn.install(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they use old names of torch
        yield


def assert_answers(answers: Answers, expected: Expected) -> None:
    """Check that each token is there once, with the output of one process in float64."""
    for out, rows in answers.values():
        assert_attended(out, None, expected.rows(rows.numpy()), "float32", "ring of ranks")
    rows = torch.cat([rows for _, rows in answers.values()])
    assert rows.sort().values.tolist() == list(range(TOKENS))


def simulated(program, size, **options):
    report = simulate(program, ranks=size, **options)
    assert report.proved, report.text()


@pytest.mark.engine("yunchang")
@needs_yunchang
@pytest.mark.parametrize("case", CASES, ids=str)
def test_yunchang_gives_what_one_process_does(case, on_kernels):
    answers: Answers = {}
    seeds = (0, 1) if case.size == 2 else (0,)
    simulated(by_yunchang(case, answers), case.size, seeds=seeds, own_modules=("yunchang",))
    assert len(answers) == case.size
    assert_answers(answers, expected_of(case.kv_heads, case.causal))
    assert "yunchang" not in sys.modules


@pytest.mark.engine("yunchang")
@needs_yunchang
@pytest.mark.parametrize("layout", ["basic", "strip"])
def test_yunchang_with_rings_low_hands_out_other_tokens_than_it_attends_to(layout, on_kernels):
    """No rank waits or differs, but values are wrong, as `docs/proof/simulate.md` says.

    When this fails, a release has mended the fault, and the page has to say so.
    """
    case, answers = Case(2, 2, layout, ulysses_low=False), {}
    simulated(by_yunchang(case, answers), 4, seeds=(0,), own_modules=("yunchang",))
    with pytest.raises(AssertionError, match="ring of ranks in float32"):
        assert_answers(answers, expected_of(HEADS))


@pytest.mark.engine("yunchang")
@needs_yunchang
def test_yunchang_with_fewer_kv_heads_than_ulysses_ranks_raises(on_kernels):
    program = by_yunchang(Case(4, 1, "basic", kv_heads=2), {})
    with pytest.raises(NotUsable, match=r"RuntimeError: shape .* is invalid .*all_to_all\.py"):
        simulate(program, ranks=4, own_modules=("yunchang",))


@pytest.mark.engine("deepspeed")
@needs_deepspeed
@pytest.mark.parametrize(("size", "kv_heads"), [(2, 8), (2, 2), (4, 4), (8, 8)])
def test_deepspeed_gives_what_one_process_does(size, kv_heads, on_kernels):
    answers: Answers = {}
    simulated(by_deepspeed(kv_heads, answers), size, time_limit=600)  # it compiles at first
    assert len(answers) == size
    assert_answers(answers, expected_of(kv_heads))


@pytest.mark.engine("deepspeed")
@needs_deepspeed
def test_deepspeed_with_heads_that_its_group_does_not_divide_is_refuted(on_kernels):
    """DeepSpeed shares out uneven heads by the rank in its own group, not in the given one."""
    (finding,) = simulate(by_deepspeed(HEADS, {}), ranks=3, time_limit=600).findings
    assert finding.kind == "other-size"
    assert "all_to_all_single" in finding.what


STRATEGIES = ("zigzag", "interleave", "contiguous")
RINGS = [ring_worker.Case(method, (64, 128)) for method in ring_worker.FUNCTIONS]


@pytest.mark.parametrize("size", [2, 3], ids="{} ranks".format)
def test_context_parallel_gives_what_it_gives_over_gloo(size, tmp_path):
    expected = run_world(size, tmp_path, prefills, active_isa(), STRATEGIES)
    for number, strategy in enumerate(STRATEGIES):
        results = {}

        def program(strategy=strategy, results=results):
            results[dist.get_rank()], cp = prefill(strategy)
            assert cp.topology().transport == "tcp"
            assert cp.topology().reason == "ranks are threads of one process"

        simulated(program, size)
        for rank in range(size):
            assert torch.equal(results[rank], expected[rank][number])


@pytest.mark.parametrize("exchange", ["gather", "all_to_all"])
def test_ranks_send_the_same_bytes_in_every_run(exchange):
    """Padding between parts of a row is sent, too, and may not be what lay in memory before."""

    def decode():
        placement = TokenInterleave(shard_size=2, interleave=1)
        cp = ContextParallel(dist.group.WORLD, page_size=4, placement=placement)
        plan = cp.plan_decode([5], block_tables=[[0, 1]])
        cp.decode(plan, torch.ones(1, 2, 16), *torch.ones(2, 2, 4, 1, 16), exchange=exchange)

    report = simulate(decode, 2, seeds=(0, 1))
    assert report.proved
    assert "order of arrival" not in report.not_checked


def test_a_rank_that_leaves_context_parallel_is_named():
    (finding,) = simulate(lambda: prefill("zigzag", leaver=1)[0], ranks=2).findings
    assert finding.kind == "rank-returned"
    assert "rank 1 has returned" in finding.what


needs_ring_flash_attn = pytest.mark.skipif(
    not ring_worker.is_there(),
    reason="ring-flash-attn is not there: pip install --no-deps ring-flash-attn==0.1.8, "
    "or a folder with its wheel in CPATTN_RING_FLASH_ATTN",
)


@pytest.mark.engine("ring-flash-attn")
@needs_ring_flash_attn
@pytest.mark.parametrize("size", [2, 4, 16], ids="{} ranks".format)
def test_ring_flash_attn_gives_what_it_gives_over_gloo(size, tmp_path):
    expected = run_world(size, tmp_path, run_ring, active_isa(), RINGS) if size < 16 else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses old names of torch
        package = ring_worker.load()
        for case in RINGS:
            results = {}

            def program(case=case, results=results):
                rank = dist.get_rank()
                results[rank] = ring_worker.run_case(package, case, rank, size)

            simulated(program, size, seeds=(0, 1) if size < 16 else (0,))
            for rank, of_cases in enumerate(expected):
                for mine, theirs in zip(results[rank], of_cases[case], strict=True):
                    assert torch.equal(mine, theirs)
