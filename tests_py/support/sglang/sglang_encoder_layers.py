# SPDX-License-Identifier: Apache-2.0
"""Layers of models with an encoder and a decoder, by this library and by sglang.

The keys of an encoder have the first slots of a request. They are new if the request has a whole
prompt; otherwise they are in the cache.
"""

from typing import Any

import torch

from support.sglang.sglang_attention_layers import (
    DIM,
    HEADS,
    Step,
    make_layer,
    make_pool,
    make_runner,
)

# isort: split
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

# A chunk behind a cached prefix, a whole prompt, and a decoded token; or only decoded tokens.
EXTENDS = ([20, 30, 1], [50, 30, 27])
DECODES = ([1, 1, 1], [50, 17, 64])
WHOLE_PAGES, ODD, NONE_OF_ONE = [48, 32, 64], [37, 20, 1], [37, 20, 0]

Answer = tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]


def attend(
    crosses: bool, lens: Any = EXTENDS, encoder_lens: Any = WHOLE_PAGES, page_size: int = 16,
    masked: bool = False, dtype: torch.dtype = torch.float32,
) -> Answer:  # fmt: skip
    """Return this library's answer, sglang's if it has one, and arguments of the oracle."""
    q_lens, own_lens = (torch.tensor(x) for x in lens)
    before = torch.tensor(encoder_lens)
    step = Step((lens[0], (before + own_lens).tolist()), page_size, dtype, windows=False)
    pool, layer = make_pool(page_size, dtype, False), make_layer(is_cross_attention=crosses)
    runner = make_runner(pool, dtype)
    backend, batch = step.begin(runner, decodes=lens is DECODES)
    batch.seq_lens = batch.seq_lens_cpu = own_lens
    batch.extend_prefix_lens = own_lens - q_lens
    batch.encoder_lens = before
    place = torch.cat([torch.arange(n) for n in step.kv_lens])
    begin = before.repeat_interleave(before + own_lens)
    seen = (place < begin) == crosses
    new = torch.zeros_like(seen)
    new[step.new] = True
    if crosses:
        whole = (own_lens == q_lens).repeat_interleave(before + own_lens)
        new = seen & whole
        batch.encoder_out_cache_loc = torch.cat(step.slots)[new]
    old, slots = seen & ~new, torch.cat(step.slots)
    pool.set_kv_buffer(layer, KVWriteLoc(slots[old]), step.k[old], step.v[old])
    kv_lens = before if crosses else own_lens
    asked: dict[str, Any] = {"causal": not crosses}
    if masked:
        mask = torch.rand(int((q_lens * kv_lens).sum())) < 0.7
        batch.cross_attention_custom_mask = mask.to(torch.uint8)
        asked["custom_mask"] = mask
    answers = []
    for attention in (backend, TorchNativeAttnBackend(runner)):
        attention.init_forward_metadata(batch)
        keys = [x[new].clone() if new.any() else None for x in (step.k, step.v)]
        answers.append(attention.forward(step.q, *keys, layer, batch).unflatten(1, (HEADS, DIM)))
    ours, native = answers
    lens_of = {"q_lens": step.q_lens, "kv_lens": kv_lens.tolist()}
    step.q_lens, step.kv_lens = lens_of.values()
    step.k, step.v = step.k[seen], step.v[seen]
    # sglang's own backend ignores masks; torch rounds weights to bfloat16, and has no answer for
    # rows without keys.
    has_native = not masked and dtype == torch.float32 and bool(kv_lens.all())
    return ours, native if has_native else None, step.oracle_inputs(**asked)


def encoders() -> dict[str, Answer]:
    return {
        **{f"to the encoder, pages of {n}": attend(True, page_size=n) for n in (1, 16)},
        "to the encoder, decode": attend(True, DECODES, ODD),
        "to the encoder, bfloat16": attend(True, encoder_lens=ODD, dtype=torch.bfloat16),
        "to the encoder, a mask": attend(True, masked=True),
        "to the encoder, none of one": attend(True, encoder_lens=NONE_OF_ONE),
        **{f"behind the encoder, pages of {n}": attend(False, page_size=n) for n in (1, 16)},
        "behind the encoder, inside of a page": attend(False, encoder_lens=ODD),
        "behind the encoder, decode": attend(False, DECODES),
        "behind the encoder, decode, inside of a page": attend(False, DECODES, ODD),
    }
