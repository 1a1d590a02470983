# SPDX-License-Identifier: Apache-2.0
"""KV transfers: the buffers of both sides, and the descriptors between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...findings import NotUsable
from ..document import SCHEMA


def from_transfer(
    source: Any,
    target: Any,
    blocks: Any,
    src_pages: Sequence[int],
    dst_pages: Sequence[int],
    *,
    num_tokens: int | None = None,
    partial: bool = False,
    names: tuple[str, str] = ("source", "target"),
) -> dict[str, Any]:
    """Make a document of the writes of one process into another.

    Parameters
    ----------
    source, target : KVLayout, or a memory in the form of the schema
        Buffers of both sides; `memory_of_lists` makes a memory from lists of pointers,
        `memory_of_pool` from a KV pool.
    blocks : TransferPlan, or three sequences of ints
        Source and target addresses and lengths of the descriptors.
    src_pages, dst_pages : ints [pages]
        Pages of the sequence on both sides.
    num_tokens : int, optional
        Tokens of the sequence; default: all tokens of the pages.
    partial : bool
        Whether other processes write the rest of the pages, which is then not required.
    names : pair of str
        Names of the two sides.

    Returns
    -------
    dict
        Document of the schema `SCHEMA`; `joined` merges those of several processes.

    Examples
    --------
    >>> from cpattn_proof import lint
    >>> from cpattn.transfer import KVEntry, KVLayout, plan_kv_transfer
    >>> layouts = [KVLayout([KVEntry(0, "k", False, a, 4096, 512)], 8) for a in (0, 8192)]
    >>> plan = plan_kv_transfer(*layouts, [1, 2], [5, 3])
    >>> lint(from_transfer(*layouts, plan, [1, 2], [5, 3])).proved
    True
    """
    if hasattr(blocks, "src_addrs"):
        blocks = (blocks.src_addrs, blocks.dst_addrs, blocks.lengths)
    sender, receiver = names
    transfer: dict[str, Any] = {"from": sender, "to": receiver, "partial": partial}
    columns = ("src_pages", "dst_pages", "src", "dst", "length")
    for name, values in zip(columns, (src_pages, dst_pages, *blocks), strict=True):
        transfer[name] = [int(value) for value in values]
    if num_tokens is not None:
        transfer["tokens"] = num_tokens
    memories = {sender: _memory(source), receiver: _memory(target)}
    return {"schema": SCHEMA, "memories": memories, "transfers": [transfer]}


def joined(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge documents of `from_transfer`, such as those of the stages of a pipeline.

    Parameters
    ----------
    documents : sequence of dict
        Documents to merge. Memories with the same name are one memory.

    Returns
    -------
    dict
        Document of the schema `SCHEMA`; all transfers together must be complete.

    Raises
    ------
    NotUsable
        If two memories with the same name differ.

    Examples
    --------
    >>> from cpattn_proof import lint
    >>> target = memory_of_lists([0, 64], [64, 64], [16, 16], [(0, "k"), (1, "k")], page_size=4)
    >>> stages = []
    >>> for layer in (0, 1):
    ...     source = memory_of_lists([1024], [64], [16], [(layer, "k")], page_size=4)
    ...     blocks = [1024 + 16], [64 * layer + 32], [16]
    ...     names = f"stage {layer}", "decode"
    ...     stages.append(from_transfer(source, target, blocks, [1], [2], names=names))
    >>> lint(joined(stages)).proved
    True
    """
    memories: dict[str, Any] = {}
    for document in documents:
        for name, memory in document["memories"].items():
            if memories.setdefault(name, memory) != memory:
                raise NotUsable(f"joined: memories of one name must be alike, {name!r} are not")
    transfers = [transfer for document in documents for transfer in document["transfers"]]
    return {"schema": SCHEMA, "memories": memories, "transfers": transfers}


def memory_of_lists(
    ptrs: Sequence[int],
    lens: Sequence[int],
    item_lens: Sequence[int],
    labels: Iterable[tuple[int, str]],
    *,
    page_size: int,
    page_strides: Sequence[int | None] | None = None,
    kv_layout: str = "NHD",
    heads: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Describe buffers given as lists of pointers, bytes and bytes per page, as in KVArgs.

    Parameters
    ----------
    ptrs, lens, item_lens : ints [buffers]
        ``kv_data_ptrs``, ``kv_data_lens`` and ``kv_item_lens``; all of it counts as registered.
    labels : iterable of (int, str)
        Layer and kind of each buffer.
    page_size : int
        Tokens per page.
    page_strides : ints [buffers], optional
        Bytes from page to page of each buffer, as in `cpattn.transfer.KVEntry`.
    kv_layout : {"NHD", "HND"}
        Order of tokens and heads in a page.
    heads : pair of int, optional
        First head of the buffers, and number of heads; required for HND.

    Returns
    -------
    dict
        A memory in the form of the schema.

    Examples
    --------
    >>> memory_of_lists([4096], [1024], [256], [(3, "k")], page_size=8)["registered"]
    [[4096, 1024]]
    """
    strides = [None] * len(ptrs) if page_strides is None else page_strides
    entries: list[dict[str, Any]] = []
    for addr, size, item, (layer, kind), stride in zip(
        ptrs, lens, item_lens, labels, strides, strict=True
    ):
        entry = {"layer": layer, "kind": kind, "addr": int(addr), "nbytes": int(size)}
        entries.append(entry | {"item_len": int(item)} | _pages(stride, kv_layout, heads))
    registered = [[entry["addr"], entry["nbytes"]] for entry in entries]
    return {"page_size": page_size, "entries": entries, "registered": registered}


def _pages(stride: int | None, kv_layout: str, heads: tuple[int, int] | None) -> dict[str, Any]:
    """Return the members of an entry that most entries lack."""
    pages: dict[str, Any] = {}
    if stride is not None:
        pages["page_stride"] = int(stride)
    if kv_layout != "NHD":
        pages["kv_layout"] = kv_layout
    if heads is not None:
        pages["heads"] = list(heads)
    return pages


def memory_of_pool(pool: Any, kinds: Sequence[str] = ("k", "v")) -> dict[str, Any]:
    """Describe the buffers of a KV pool: cpattn's, or sglang's with the same methods.

    Parameters
    ----------
    pool : object
        Pool with ``get_contiguous_buf_infos``, ``start_layer`` and ``page_size``; optional are
        ``page_strides``, a dict by kind, and ``kv_layout``; "HND" needs ``num_kv_heads``.
    kinds : sequence of str
        Groups of buffers in order, each with a buffer per layer. Latents of MLA are
        ``("k", "v", "index_k")`` on an NPU.

    Returns
    -------
    dict
        A memory in the form of the schema; all of it counts as registered.

    Raises
    ------
    NotUsable
        If kinds differ in the number of buffers.

    Examples
    --------
    >>> from cpattn.kv import MHATokenToKVPool
    >>> sizes = {"size": 8, "page_size": 4, "num_kv_heads": 1, "head_dim": 16}
    >>> pool = MHATokenToKVPool(num_layers=2, start_layer=3, **sizes)
    >>> [(entry["layer"], entry["kind"]) for entry in memory_of_pool(pool)["entries"]]
    [(3, 'k'), (4, 'k'), (3, 'v'), (4, 'v')]
    """
    ptrs, lens, item_lens = pool.get_contiguous_buf_infos()
    num_layers, rest = divmod(len(ptrs), len(kinds))
    if rest:
        raise NotUsable(
            f"memory_of_pool: there must be as many buffers of each of {list(kinds)}, got "
            f"{len(ptrs)}"
        )
    first = pool.start_layer or 0
    labels = [(layer, kind) for kind in kinds for layer in range(first, first + num_layers)]
    strides, order = getattr(pool, "page_strides", {}), getattr(pool, "kv_layout", "NHD")
    return memory_of_lists(
        ptrs, lens, item_lens, labels, page_size=pool.page_size,
        page_strides=[strides.get(kind) for _, kind in labels], kv_layout=order,
        heads=(0, pool.num_kv_heads) if order == "HND" else None,
    )  # fmt: skip


def _memory(side: Any) -> dict[str, Any]:
    """Return the memory of a KVLayout; a mapping is one already."""
    if isinstance(side, dict):
        return side
    entries = []
    for entry in side.entries:
        total = side.total_kv_heads or 1
        if entry.kind not in ("k", "v", "k_scale", "v_scale"):
            total = 1
        heads = side.tp_rank * total // side.tp_size, max(total // side.tp_size, 1)
        order = entry.kv_layout if total > 1 else "NHD"  # both orders agree for one head
        part = {
            "layer": entry.layer_id, "kind": entry.kind, "draft": bool(entry.is_draft),
            "addr": int(entry.addr), "nbytes": int(entry.nbytes), "item_len": int(entry.item_len),
        }  # fmt: skip
        part |= _pages(entry.page_stride, order, heads if total > 1 else None)
        tags = {"dtype": entry.dtype, "layout_tag": entry.layout_tag}
        entries.append(part | {name: tag for name, tag in tags.items() if tag})
    return {"page_size": side.page_size, "entries": entries}
