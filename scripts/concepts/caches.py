# SPDX-License-Identifier: Apache-2.0
"""Pages, pools, what an indexer selects, and what goes from one server to another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import cpattn
from cpattn import sparse
from cpattn.sparse import sglang_0_5_23
from cpattn.transfer import KVLayout, TransferPlan, plan_kv_transfer

from .canvas import Canvas

LEFT = 20


def slots_of(pages: Sequence[int], num_tokens: int, page_size: int) -> list[int]:
    return [pages[t // page_size] * page_size + t % page_size for t in range(num_tokens)]


def paged_kv() -> str:
    page_size, tables, lengths = 4, [[3, 1, 6], [5, 2]], [10, 6]
    pool = cpattn.kv.MHATokenToKVPool(
        size=28, page_size=page_size, num_layers=1, num_kv_heads=1, head_dim=16,
        dtype="float32", container="numpy",
    )  # fmt: skip
    for s, (pages, length) in enumerate(zip(tables, lengths, strict=True)):
        names = 100.0 * (s + 1) + np.arange(length, dtype=np.float32)
        rows = names[:, None, None].repeat(16, axis=2)
        pool.set_kv_buffer(0, slots_of(pages, length, page_size), rows, rows)
    memory = pool.get_key_buffer(0)[:, :, 0, 0]
    picture = Canvas(
        "Paged keys and values, and block tables",
        "Two sequences of 10 and 6 tokens. Their block tables name the pages of a shared pool "
        "that hold their tokens, in any order.",
    )
    cell, wide = 24.0, 76.0
    bottom = 196.0
    picture.text(LEFT, 20, "Sequences, and their block tables:", "bold")
    x, ends = float(LEFT), {}
    for s, (pages, length) in enumerate(zip(tables, lengths, strict=True)):
        for i, page in enumerate(pages):
            held = min(page_size, length - i * page_size)
            for t in range(held):
                token = i * page_size + t
                picture.rect(x + t * cell, 32, cell, 28, f"r{s}")
                words = f"{'AB'[s]}{token}"
                picture.text(x + (t + 0.5) * cell, 50.5, words, "small", anchor="middle")
            picture.block(x + 6, 70, wide, 24, f"page {page}", "plain")
            ends[page] = (x + 6 + wide / 2, s)
            x += page_size * cell + 8
        x += 24
    step = 660 / pool.num_pages
    for page, (at, _) in ends.items():
        picture.line((at, 94), (LEFT + page * step + (step - 8) / 2, bottom - 24), arrow=True)
    picture.text(LEFT, bottom - 30, "Pool:", "bold")
    for page in range(pool.num_pages):
        left = LEFT + page * step
        picture.text(left + (step - 8) / 2, bottom - 8, f"page {page}", "soft", anchor="middle")
        for row in range(page_size):
            name = int(memory[page, row])
            s, token = name // 100 - 1, name % 100
            box = (left, bottom + row * 22, step - 8, 22)
            if s >= 0:
                picture.block(*box, f"{'AB'[s]}{token}", f"r{s}")
            else:
                picture.block(*box, "padding" if (page, row) == (0, 0) else "", "plain")
    token = 6
    slot = slots_of(tables[0], lengths[0], page_size)[token]
    below = bottom + page_size * 22 + 6
    below = picture.paragraph(
        LEFT, below, 660,
        f"Where is token A{token}? {token} // {page_size} = {token // page_size}, so in page "
        f"{tables[0][token // page_size]}; {token} % {page_size} = {token % page_size}, so in row "
        f"{token % page_size}: slot {tables[0][token // page_size]} × {page_size} + "
        f"{token % page_size} = {slot}. Page 0 takes what padding writes.",
    )  # fmt: skip
    return picture.finish()


def sparse_attention() -> str:
    num_keys, topk, page_size, pages = 16, 4, 4, [5, 2, 7, 3]
    rng = np.random.default_rng(5)
    index_k = rng.integers(-1, 2, (num_keys, 16)).astype(np.float32)
    index_q = rng.integers(-1, 2, (2, 2, 16)).astype(np.float32)
    weights = np.array([[2, 1], [1, 2]], np.float32)
    seen = [14, 16]
    logits = sparse.indexer_logits(index_q, index_k, weights, [0, 0], seen)
    chosen = sparse.indexer_topk(index_q, index_k, weights, [0, 0], seen, topk=topk)
    table = np.array([slots_of(pages, num_keys, page_size)], np.int32)
    slots = sglang_0_5_23.transform_index_page_table_prefill(table, chosen, [2])
    row = sparse.quantize_kv_rows(
        np.zeros((1, 1, 512), np.float32), np.zeros((1, 1, 64), np.float32)
    )
    codes, _ = sparse.quantize_kv_rows_separate(
        np.zeros((1, 1, 512), np.float32), np.zeros((1, 1, 64), np.float32)
    )
    picture = Canvas(
        "Sparse attention: indexer, top-k, rows of the cache",
        "An indexer scores the keys that a query sees, the best four are looked up in the page "
        "table, and attention reads these rows of the cache only.",
    )
    cell, x0, y = 34.0, 136.0, 20.0
    picture.text(LEFT, y, "1. The indexer gives every key a score", "bold")
    for j in range(num_keys):
        picture.text(x0 + (j + 0.5) * cell, y + 22, f"{j}", "soft", anchor="middle")
    for i in range(2):
        top = y + 30 + i * 32
        picture.text(LEFT, top + 18, f"query at {seen[i] - 1}")
        for j in range(num_keys):
            if np.isfinite(logits[i, j]):
                kind = f"r{i}" if j in chosen[i] else "plain"
                picture.block(x0 + j * cell, top, cell, 26, f"{int(logits[i, j])}", kind)
            else:
                picture.rect(x0 + j * cell, top, cell, 26, "empty")
    y += 124
    picture.text(LEFT, y, f"2. The top {topk} of them", "bold")
    picture.text(270, y, "3. The page table: slots", "bold")
    for i in range(2):
        top = y + 12 + i * 32
        for j in range(topk):
            picture.block(LEFT + j * 40, top, 40, 26, f"{chosen[i, j]}", f"r{i}")
            picture.block(270 + j * 40, top, 40, 26, f"{slots[i, j]}", f"r{i}")
        picture.line((LEFT + topk * 40 + 10, top + 13), (260, top + 13), arrow=True)
    position = int(chosen[0, 0])
    page, line = pages[position // page_size], position % page_size
    for i, words in enumerate(
        (
            f"block table {pages}:",
            f"key {position} is in page {page}, row {line},",
            f"slot {page} × {page_size} + {line} = {slots[0, 0]}",
        )
    ):
        picture.text(446, y + 28 + 17 * i, words, "soft")
    y += 112
    picture.text(LEFT, y, "4. Attention reads these rows of the cache", "bold")
    picture.text(680, y, "dashed: pages of other sequences", "soft", anchor="end")
    num_slots = 8 * page_size
    side = 660 / num_slots
    for s in range(num_slots):
        users = [i for i in range(2) if s in slots[i]]
        x = LEFT + s * side
        if s in table:
            picture.rect(x, y + 12, side, 30, "plain")
        else:
            picture.rect(x, y + 12, side, 30, "empty")
        for i in users:
            high = 30 / len(users)
            picture.rect(x, y + 12 + users.index(i) * high, side, high, f"r{i}")
        if s % page_size == 0:
            picture.text(x + 2 * side, y + 58, f"page {s // page_size}", "soft", anchor="middle")
    y += 86
    total, latent = row.shape[-1], codes.shape[-1]
    picture.text(LEFT, y, f"A row in FP8 has {total} bytes:", "bold")
    parts = [
        (512, "512 e4m3 codes", "cool"),
        (latent - 512, "", "warm"),
        (total - latent, "rope: 64 bfloat16", "green"),
    ]
    x = float(LEFT)
    for size, words, kind in parts:
        width = 660 * size / total
        picture.block(x, y + 12, width, 28, words, kind)
        x += width
    edge = LEFT + 660 * (512 + 8) / total
    picture.line((edge, y + 42), (edge, y + 50))
    picture.text(edge, y + 63, f"{(latent - 512) // 4} float32 scales", anchor="middle")
    return picture.finish()


def pools() -> str:
    page_size = 4
    size = {"size": 12, "page_size": page_size, "num_layers": 2}
    dense = cpattn.kv.MHATokenToKVPool(num_kv_heads=2, head_dim=64, v_head_dim=128, **size)
    latent = cpattn.kv.MLATokenToKVPool(
        kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128, **size
    )
    picture = Canvas(
        "Pools, their buffers and item lengths",
        "A pool has one buffer for each kind and layer. The item length is the bytes of one page "
        "of it, and differs between the kinds.",
    )
    y = 20.0
    kinds = {"k": ("K", "r0"), "v": ("V", "r1"), "index_k": ("index K", "r2")}
    for pool, says in (
        (dense, "MHA: 2 KV heads, keys of 64, values of 128"),
        (latent, "MLA: latent keys of 512, rope of 64, indexer of 128"),
    ):
        _, sizes, items = pool.get_contiguous_buf_infos()
        picture.text(LEFT, y, says, "bold")
        picture.text(LEFT, y + 20, "buffer", "soft")
        picture.text(176, y + 20, "item_len", "soft", anchor="end")
        picture.text(190, y + 20, "pages 0 1 2 3", "soft")
        picture.text(680, y + 20, "bytes of the buffer", "soft", anchor="end")
        y += 28
        names = [(kind, layer) for kind in pool.kinds for layer in range(2)]
        for (kind, layer), nbytes, item in zip(names, sizes, items, strict=True):
            label, colour = kinds[kind]
            picture.text(LEFT, y + 14, f"{label}, layer {layer}")
            picture.text(176, y + 14, f"{item:,}", anchor="end")
            width = 340 * item / 4 / 4096
            for page in range(pool.num_pages):
                picture.rect(190 + page * width, y, width, 18, colour)
            picture.text(680, y + 14, f"{nbytes // item} × {item:,} = {nbytes:,}", anchor="end")
            y += 23
        y += 28
    item = dense.get_contiguous_buf_infos()[2][0]
    token = item // page_size
    picture.text(LEFT, y, "A wrong item length copies the wrong bytes", "bold")
    picture.paragraph(
        LEFT, y + 2, 660,
        f"Page 2 of K begins at 2 × {item:,} and has {item:,} bytes. With the bytes of one token, "
        f"{token}, instead: at {2 * token}, inside page 0, and a quarter of a page is copied.",
    )  # fmt: skip
    y += 48
    for page in range(dense.num_pages):
        x = LEFT + page * 165
        for row in range(page_size):
            picture.rect(x + row * 165 / 4, y, 165 / 4, 22, "r0" if page == 2 else "plain")
        picture.text(x + 82, y + 38, f"page {page}", "soft", anchor="middle")
    picture.rect(LEFT + 2 * 165 / 4, y + 3, 165 / 4, 16, "r1")
    picture.text(LEFT + 165 * (2 + 1 / 8), y + 15, "right", "small", anchor="middle")
    picture.text(LEFT + 2.5 * 165 / 4, y + 15, "wrong", "small", anchor="middle")
    return picture.finish()


def runs_of(
    plan: TransferPlan, layout: KVLayout, addrs: Sequence[int]
) -> set[tuple[str, int, int, int]]:
    """Kind, layer, first page and pages of every block at one side."""
    found = set()
    for addr, length in zip(addrs, plan.lengths, strict=True):
        for entry in layout.entries:
            if 0 <= (offset := int(addr) - entry.addr) < entry.nbytes:
                page, count = offset // entry.item_len, int(length) // entry.item_len
                found.add((entry.kind, entry.layer_id, page, count))
    return found


def kv_transfer() -> str:
    page_size, num_tokens = 16, 42
    size = {"page_size": page_size, "num_kv_heads": 2, "head_dim": 64}
    stages = [
        cpattn.kv.MHATokenToKVPool(size=80, num_layers=2, start_layer=first, **size)
        for first in (0, 2)
    ]
    decode = cpattn.kv.MHATokenToKVPool(size=128, num_layers=4, **size)
    here, there = [3, 4, 1], [7, 8, 2]
    target = KVLayout.from_pool(decode)
    picture = Canvas(
        "What travels between prefill and decode",
        "Two pipeline stages send the pages of a prompt to one decode server: each buffer to that "
        "of the same kind and layer, pages that are neighbours on both sides as one block.",
    )
    cell, row, right = 17.0, 19.0, 474.0
    picture.text(LEFT, 20, "prefill: two stages of two layers", "bold")
    picture.text(right, 20, "decode: all four layers", "bold")

    def buffers(
        pool: cpattn.kv.MHATokenToKVPool, x: float, y: float, marked: set[tuple[str, int, int, int]]
    ) -> dict[tuple[str, int], float]:
        places = {}
        for kind in pool.kinds:
            for layer in range(pool.start_layer, pool.end_layer):
                picture.text(x, y + 13, f"{kind.upper()} {layer}", "soft")
                for page in range(pool.num_pages):
                    runs = [
                        n
                        for k, l, first, n in marked
                        if (k, l) == (kind, layer) and first <= page < first + n
                    ]
                    box = x + 36 + page * cell
                    colour = f"r{2 - runs[0]}" if runs else "plain"
                    picture.rect(box, y, cell, 16, colour)
                    if runs:
                        picture.text(box + cell / 2, y + 12.5, f"{page}", "small", anchor="middle")
                places[kind, layer] = y + 8
                y += row
        return places

    plans, tops, received = [], [], set()
    y = 32.0
    for stage in stages:
        source = KVLayout.from_pool(stage, layers=(stage.start_layer, stage.end_layer))
        plan = plan_kv_transfer(source, target, here, there)
        plans.append(plan)
        tops.append(buffers(stage, LEFT, y, runs_of(plan, source, plan.src_addrs)))
        received |= runs_of(plan, target, plan.dst_addrs)
        y += 4 * row + 30
    ends = buffers(decode, right, 44.0, received)
    for stage, places, plan in zip(stages, tops, plans, strict=True):
        for (kind, layer), at in places.items():
            start = LEFT + 36 + stage.num_pages * cell
            picture.line((start + 4, at), (right - 6, ends[kind, layer]), arrow=True)
        words = f"{len(plan)} blocks, {plan.total_bytes // 1024} KiB"
        picture.text(LEFT + 36, max(places.values()) + 26, words)
    y = picture.height + 26
    picture.text(
        LEFT,
        y,
        f"{num_tokens} tokens fill {len(here)} pages: {here} at prefill, {there} at decode.",
    )
    picture.text(
        LEFT, y + 17, "Pages 3 and 4 become 7 and 8: one block. Page 1 becomes 2: another one."
    )
    y += 60
    picture.text(LEFT, y, "In this order:", "bold")
    steps = (
        ("KV pages,\nchunk by chunk", "r0"),
        ("state, for\nhybrid models", "r2"),
        ("metadata with the\nfirst token", "r3"),
    )
    x = 130.0
    for i, (words, kind) in enumerate(steps):
        picture.label(x, y - 22, 150, 44, words, kind)
        if i < 2:
            picture.line((x + 150, y), (x + 178, y), arrow=True)
        x += 180
    picture.text(
        130, y + 42, "The metadata tell decode that the rest is there, so they come last.", "soft"
    )
    return picture.finish()
