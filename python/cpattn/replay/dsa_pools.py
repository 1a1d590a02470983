# SPDX-License-Identifier: Apache-2.0
"""What a rank keeps of the tokens of a sparse model: latent rows, and keys of the indexer.

Not an `MLATokenToKVPool`, which keeps the latent and its rotary part in buffers of their own:
`flash_mla_sparse_fwd` and the FP8 rows have both in one row.
Both pools start as NaN: whatever reads a slot before it is written is found out.
"""

from __future__ import annotations

import torch
from torch import Tensor

import cpattn
from cpattn.distributed import ContextParallel, ContextParallelPlan

from .dsa_model import DsaConfig, SparseInputs


class PlainPools:
    """Rows in the dtype of the model."""

    def __init__(self, config: DsaConfig, num_pages: int, page_size: int) -> None:
        dtype, num_slots = config.torch_dtype, num_pages * page_size
        self.kv = torch.full((num_slots, 1, config.latent_dim), torch.nan, dtype=dtype)
        self.index_k = torch.full((num_slots, 1, config.index_head_dim), torch.nan, dtype=dtype)

    def write(self, cp: ContextParallel, plan: ContextParallelPlan, inputs: SparseInputs) -> None:
        """Exchange the rows of the new tokens, and write those of all ranks."""
        cp.write_kv(plan, inputs.latent, inputs.index_k[:, None], self.kv, self.index_k)

    def index_queries(self, inputs: SparseInputs) -> tuple[Tensor, Tensor]:
        """Queries and weights for the keys as they are stored."""
        return inputs.index_q, inputs.index_weights

    def read_kv(self, slots: Tensor) -> Tensor:
        """Latent rows [n, latent_dim], by torch."""
        return self.kv[slots, 0]

    def read_index_k(self, slots: Tensor) -> Tensor:
        """Keys of the indexer [n, index_head_dim], by torch."""
        return self.index_k[slots, 0]


class Fp8Pools:
    """Latent rows of 656 bytes; of the indexer pages of e4m3 keys, then their scales.

    A Hadamard transform, which leaves products as they are, spreads outliers before queries and
    keys of the indexer are quantised.
    """

    def __init__(self, config: DsaConfig, num_pages: int, page_size: int) -> None:
        self._config = config
        self._page_size = page_size
        width = config.index_head_dim + 4
        self.kv = torch.full((num_pages * page_size, 1, 656), 0xFF, dtype=torch.uint8)
        self.index_k = torch.full((num_pages, page_size * width), 0xFF, dtype=torch.uint8)

    def write(self, cp: ContextParallel, plan: ContextParallelPlan, inputs: SparseInputs) -> None:
        """Quantise the rows of this rank, exchange them as bytes, write those of all ranks."""
        c = self._config
        nope, rope = inputs.latent.split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        codes, scale = self._quantise(inputs.index_k)
        parts = cpattn.quantize_kv_rows(nope, rope)[:, 0], codes, scale
        rows = cp.gather(plan, torch.cat([part.view(torch.uint8) for part in parts], -1))
        latent, codes, scale = rows.split([656, c.index_head_dim, 4], -1)
        slots = torch.from_numpy(plan.slots.copy())
        self.kv[slots[slots >= 0], 0] = latent[slots >= 0]
        cpattn.write_index_k_cache(
            self.index_k, plan.slots, codes.contiguous(), scale.contiguous().view(torch.float32)
        )

    def index_queries(self, inputs: SparseInputs) -> tuple[Tensor, Tensor]:
        """Codes of the queries, and weights with their scales."""
        codes, scale = self._quantise(inputs.index_q)
        return codes, inputs.index_weights * scale[..., 0]

    def read_kv(self, slots: Tensor) -> Tensor:
        """Latent rows [n, latent_dim], by torch."""
        rows = self.kv[slots, 0]
        nope, scale, rope = rows.split([512, 16, 128], -1)
        groups = nope.view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
        latent = groups * scale.contiguous().view(torch.float32)[..., None]
        latent = latent.flatten(-2).bfloat16()
        return torch.cat([latent, rope.contiguous().view(torch.bfloat16)], -1)

    def read_index_k(self, slots: Tensor) -> Tensor:
        """Keys of the indexer [n, index_head_dim], by torch."""
        dim = self._config.index_head_dim
        codes, scale = self.index_k.split([self._page_size * dim, self._page_size * 4], -1)
        keys = codes.unflatten(-1, (-1, dim)).flatten(0, 1)[slots].view(torch.float8_e4m3fn)
        scales = scale.contiguous().view(torch.float32).flatten()[slots]
        return (keys.float() * scales[:, None]).bfloat16()

    @staticmethod
    def _quantise(x: Tensor) -> tuple[Tensor, Tensor]:
        dim = x.shape[-1]
        return cpattn.quantize_index(cpattn.hadamard_transform(x, dim**-0.5))
