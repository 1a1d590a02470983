# SPDX-License-Identifier: Apache-2.0
"""Programs of ranks in a round of faults: calls with checked results, and a last gather."""

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from cpattn.kv import MHATokenToKVPool
from support.cases import assert_attention, expected_attention
from support.distributed.distributed_worker import make_plan
from support.distributed.fault_rounds import SHARDED, STEP, Round
from support.distributed.fault_triggers import Trigger
from support.distributed.hosts.layouts import on_hosts
from support.distributed.prefill_batches import Batch, Case, expected_of, make_batch
from support.distributed.sharded_worker import PLACEMENTS, equal, shard_of
from support.tolerances import Expected, assert_attended

ROW_BYTES = 1 << 17  # bytes of a row in a gather: more than sockets hold
LAYER = 1
LAYERS = 3  # layers, each with cached keys of the next one in flight
POOL_TOKENS = 4096  # tokens of a pool, enough for a part from each rank


class Program:
    """Calls of one rank; `call` names the last one."""

    def __init__(self, one: Round, rank: int, trigger: Trigger) -> None:
        self.round, self.rank, self.trigger = one, rank, trigger
        self.is_culprit = rank == one.culprit
        self.call = "topology"
        self.at_the_end = False  # no fault comes after this
        self.refusals: list[str] = []  # errors after which the group stayed usable
        self.case: Case = one.batch
        self.options: dict[str, Any] = {
            "strategy": self.case.strategy,
            "page_size": self.case.page_size,
            "transport": "tcp" if one.transport == "tcp" else "auto",
        }

    def run(self) -> None:
        """Make all calls of the round; they raise errors of the library."""
        world, exchange = dist.group.WORLD, self.round.exchange
        plain = ContextParallel(world, **self.options)
        if self.round.transport != "tcp":
            with on_hosts(self.round.hosts, self.rank):
                topology = self._called("topology", plain.topology)
            assert topology.transport == self.round.transport, topology.reason
        if exchange in (*SHARDED, "prefetch"):
            sharded = ContextParallel(
                world,
                **self.options,
                placement=PLACEMENTS["pages"](self.round.size, self.case.page_size),
                exchange="gather" if exchange == "prefetch" else exchange,
            )
        programs: dict[str, Callable[[], None]] = {
            "rows": lambda: self._gather_rows(plain),
            "decode": lambda: self._decode(world),
            "prefetch": lambda: self._prefill_ahead(sharded),
            **dict.fromkeys(SHARDED, lambda: self._prefill(sharded)),
        }
        programs.get(exchange, lambda: self._prefill(plain))()
        self.at_the_end = True
        plan = plain.plan([8], block_tables=[range(8)])  # all ranks are still there
        self._called("gather", plain.gather, plan, torch.zeros(8, 4))

    def _called(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call in which other ranks take part; the fault may come in it."""
        self.call = name
        self.trigger.armed = self.is_culprit and not (self.trigger.fired or self.at_the_end)
        try:
            return function(*arguments)
        finally:
            self.trigger.armed = False

    def _differs(self) -> bool:
        """Return whether this is the culprit, which now differs; record the time."""
        if not self.is_culprit:
            return False
        self.trigger.board.value = time.monotonic()
        return True

    def _agreed(self, attempt: Callable[[], Any]) -> None:
        """Make a call that all ranks must refuse; the group stays usable."""
        try:
            attempt()
        except (RuntimeError, TypeError, ValueError) as error:
            self.refusals.append(f"{type(error).__name__}: {error}")
        else:
            raise AssertionError("ranks that differ went on")

    def _with_differences(self, write: Callable[[Any], None], plan: Any, other: Any) -> None:
        """Make the call; in rounds of such faults, first make one in which the culprit differs."""
        fault = self.round.fault
        if fault in ("plan", "arguments") and not self.refusals:
            odd = other if fault == "plan" else "no plan"
            used = odd if self._differs() else plan
            self._agreed(lambda: write(used))
        write(plan)

    def _batch(self, cp: ContextParallel) -> tuple[Batch, Any, Any, list[torch.Tensor]]:
        batch, case = make_batch(self.case), self.case
        plan = make_plan(cp, case, batch)
        slots = plan.slots.copy()
        slots[0] = -1
        whole = (batch.q, batch.new(case, batch.k), batch.new(case, batch.v))
        other = make_plan(cp, case, batch, out_cache_loc=slots)
        return batch, plan, other, [cp.shard(plan, x) for x in whole]

    def _prefill(self, cp: ContextParallel) -> None:
        batch, plan, other, rows = self._batch(cp)
        for _ in range(self.round.repeats):
            caches = self._caches(cp, batch)
            before = [cache.clone() for cache in caches]

            def write(plan: Any, caches: list[torch.Tensor] = caches) -> None:
                self._called("write_kv", cp.write_kv, plan, *rows[1:], *caches)

            try:
                self._with_differences(write, plan, other)
            except BaseException:
                # Shared pools receive the rows of all ranks one by one.
                assert self.round.exchange == "shared" or equal(caches, before), "half written"
                raise
            out = self._called("attend", cp.attend, plan, rows[0], *caches)
            out = self._called("gather", cp.gather, plan, out)
            op = "ring of ranks" if self.round.exchange in ("ring", "pass_q") else "attention"
            assert_attended(out, None, expected_of(self.case), "float32", op)

    def _prefill_ahead(self, cp: ContextParallel) -> None:
        """Attend in layers; at the end of each, the cached keys of the next are in flight."""
        batch, plan, other, (q, k, v) = self._batch(cp)
        for _ in range(self.round.repeats):
            caches = self._caches(cp, batch)
            prefixes: list[Any] = []
            layers = [tuple(caches)] * LAYERS

            def prefetch(plan: Any, layers: Any = layers, prefixes: Any = prefixes) -> None:
                prefixes.append(self._called("prefetch", cp.prefetch, plan, layers))

            self._with_differences(prefetch, plan, other)
            new = {"k_local": k, "v_local": v, "prefetched": prefixes[-1]}
            for _ in range(LAYERS):
                out = self._called("attend", partial(cp.attend, **new), plan, q, *caches)
            out = self._called("gather", cp.gather, plan, out)
            assert_attended(out, None, expected_of(self.case), "float32", "attention")

    def _caches(self, cp: ContextParallel, batch: Batch) -> list[torch.Tensor]:
        whole, case = [batch.k_cache, batch.v_cache], self.case
        if cp.placement is not None:
            return [shard_of(cp.placement, self.rank, x, case.page_size) for x in whole]
        if self.round.exchange != "shared":
            return [x.clone() for x in whole]
        pool = self._called(
            "shared_memory",
            lambda: MHATokenToKVPool(
                size=len(batch.k_cache) + POOL_TOKENS, page_size=case.page_size, num_layers=2,
                num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, dtype=case.dtype,
                use_fia=False, memory=cp.shared_memory(),
            ),
        )  # fmt: skip
        caches = pool.get_kv_buffer(LAYER)
        plan = cp.plan([8], block_tables=[range(8)])
        if any(self.rank == ranks[0] for ranks in self.round.hosts):
            for cache, rows in zip(caches, whole, strict=True):
                cache.flatten(0, 1)[: len(rows)] = rows
        self._called("gather", cp.gather, plan, torch.zeros(8, 4))  # wait until it is filled
        return list(caches)

    def _repeated(
        self, name: str, function: Callable[..., Any], plan: Any, other: Any, *arguments: Any
    ) -> Iterator[Any]:
        for _ in range(self.round.repeats):
            results: list[Any] = []

            def call(plan: Any, results: list[Any] = results) -> None:
                results.append(self._called(name, function, plan, *arguments))

            self._with_differences(call, plan, other)
            yield results[-1]

    def _gather_rows(self, cp: ContextParallel) -> None:
        plan = cp.plan([18], block_tables=[range(18)])
        other = cp.plan([18], [20], block_tables=[range(18)])
        whole = torch.arange(18)[:, None].repeat(1, ROW_BYTES // 8)
        for rows in self._repeated("gather", cp.gather, plan, other, cp.shard(plan, whole)):
            assert torch.equal(rows, whole)

    def _decode(self, world: dist.ProcessGroup) -> None:
        placement = PLACEMENTS["pages"](self.round.size, STEP.page_size)
        options = self.options | {"page_size": STEP.page_size}
        cp = ContextParallel(world, **options, placement=placement)
        inputs = STEP.inputs()
        tables = inputs["block_tables"]
        plan = cp.plan_decode(STEP.kv_lens, q_lens=STEP.q_lens, block_tables=tables)
        other = cp.plan_decode(STEP.kv_lens[::-1], q_lens=STEP.q_lens, block_tables=tables.flip(0))
        shards = [
            shard_of(placement, self.rank, inputs[name], STEP.page_size)
            for name in ("k_cache", "v_cache")
        ]
        for out in self._repeated("decode", cp.decode, plan, other, inputs["q"], *shards):
            expected = expected_of_step()
            assert_attention(out, None, inputs, op="ring of ranks", expected=expected)


@cache
def expected_of_step() -> Expected:
    return expected_attention(STEP.inputs())
