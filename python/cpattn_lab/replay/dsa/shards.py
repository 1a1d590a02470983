# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of a rank whose pool has a share of the keys."""

from __future__ import annotations

from torch import Tensor

from cpattn.distributed import ContextParallel, ContextParallelPlan
from cpattn.kv.mha import MHATokenToKVPool
from cpattn.scheduling.scheduler import Batch

from ..dense.baseline import segments_of
from ..dense.whole_pages import WholePages
from ..phases import PhaseClock
from ..pools import make_nan_pool
from .attention import RankAttention
from .model import DsaConfig, SparseInputs
from .pools import choose_positions, row_runs


class ShardedSparseAttention(RankAttention):
    """`SparseOperators` of one rank by `ContextParallel.attend_sparse`, which is one phase.

    The pool has rows of latents as keys, and keys of the indexer as values.
    """

    def __init__(
        self, config: DsaConfig, cp: ContextParallel, num_pages: int, layers: range
    ) -> None:
        super().__init__(config, cp)
        (self._layer,) = layers
        self.pool = make_nan_pool(
            MHATokenToKVPool,
            num_pages,
            cp.page_size,
            layers,
            num_kv_heads=1,
            head_dim=config.latent_dim,
            v_head_dim=config.index_head_dim,
            dtype=config.dtype,
            use_fia=False,
        )

    def begin(self, batch: Batch, plan: ContextParallelPlan, clock: PhaseClock) -> None:
        """Take up a batch; its call follows."""
        super().begin(batch, plan, clock)
        self._chosen: Tensor | None = None

    def attend(self, layer: int, inputs: SparseInputs) -> Tensor:
        """See `SparseOperators`."""
        c, plan = self._config, self._plan
        latents, index_k = self.pool.get_kv_buffer(layer)
        with self._clock("gather"):
            self._cp.write_kv(plan, inputs.latent, inputs.index_k[:, None], latents, index_k)
        with self._clock("attention"):
            out: Tensor = self._cp.attend_sparse(
                plan,
                inputs.q,
                latents,
                inputs.index_q,
                index_k,
                inputs.index_weights,
                topk=c.topk,
                sm_scale=c.scale,
                d_v=c.kv_lora_rank,
            )
        self._call = inputs, out
        return out

    @property
    def exchange(self) -> str:
        """Exchange of this batch: how its queries and keys met."""
        c = self._config
        chosen = self._cp.choose_sparse_exchange(
            self._plan,
            topk=c.topk,
            num_heads=c.num_heads,
            num_index_heads=c.index_heads,
            head_dim=c.latent_dim,
            d_v=c.kv_lora_rank,
            index_head_dim=c.index_head_dim,
            element_bytes=c.torch_dtype.itemsize,
            index_element_bytes=c.torch_dtype.itemsize,
        )
        return chosen.exchange if self._cp.exchange == "auto" else self._cp.exchange

    @property
    def chosen(self) -> Tensor:
        """Positions [rows, topk] that the indexer chooses among all keys in one place.

        If `attend` took other keys, the check finds its output wrong. All ranks must ask for the
        positions together, since they gather the keys.
        """
        if self._chosen is None:
            inputs, _ = self._call
            whole = self._whole_pages()
            self._chosen = choose_positions(
                self._config,
                (inputs.index_q, inputs.index_weights),
                whole.get_kv_buffer(self._layer)[1],
                self._plan.metadata,
                block_tables=whole.tables,
                page_size=whole.page_size,
            )
        return self._chosen

    def flops(self) -> dict[str, int]:
        """Return useful flops of the batch on this rank, in its only phase."""
        return {"attention": sum(super().flops().values())}

    def baseline(self) -> tuple[dict[str, float], float]:
        """Return the seconds of torch, gathering included, and the largest difference."""
        inputs, _ = self._call
        clock = PhaseClock()
        with clock("attention"):
            whole = self._whole_pages()
            segments = segments_of(self._plan, whole.tables, masks=False)
            latents, index_k = (x.flatten(0, 2) for x in whole.get_kv_buffer(self._layer))
        difference = self._difference(
            clock,
            segments,
            (inputs.index_q, inputs.index_weights),
            (index_k.__getitem__, latents.__getitem__),
            row_runs(self._batch, self._plan, whole.tables).slots(self.chosen),
        )
        return {"attention": sum(clock.seconds.values())}, difference

    def _whole_pages(self) -> WholePages:
        return WholePages(self._cp, self.pool, self._batch).of_layer(self._layer)
