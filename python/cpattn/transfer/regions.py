# SPDX-License-Identifier: Apache-2.0
"""Memory regions to register with an engine for the buffers that a server lists."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _core
from .._arguments import at_least


def registration_regions(
    ptrs: Sequence[int], lens: Sequence[int], *, alignment: int = 1
) -> tuple[list[int], list[int]]:
    """List addresses and sizes for one ``engine.register``, and the addresses for ``unregister``.

    Empty buffers, which hold the place of a layer in a list, are left out. Overlapping buffers
    become one region, such as a buffer listed twice (as KV and as state), or buffers with
    interleaved pages. The lists for peers do not change.

    Parameters
    ----------
    ptrs, lens : sequences of int
        Address and bytes of all buffers: KV, aux, state.
    alignment : int
        Bytes. If above 1, the granularity to which the engine rounds ranges (2 MiB: MemFabric).
        Ranges that overlap or touch after rounding become one, from their first byte to their last.

    Returns
    -------
    addrs, sizes : lists of int
        Regions to register; ascending if `alignment` is above 1 or any buffers overlap.

    Raises
    ------
    TypeError
        If a number is no integer.
    ValueError
        If lists differ in length, a number is outside [0, 2^64), bytes lie at address 0 or beyond
        2^64, or `alignment` is below 1.

    Examples
    --------
    >>> registration_regions([4096, 8192, 0, 4096], [512, 1024, 0, 512])
    ([4096, 8192], [512, 1024])
    >>> registration_regions([4096, 8192, 0, 4096], [512, 1024, 0, 512], alignment=1 << 21)
    ([4096], [5120])
    """
    ptrs = _core.address_list("registration_regions: ptrs", ptrs)
    lens = _core.address_list("registration_regions: lens", lens)
    alignment = at_least(1, alignment, "registration_regions", "alignment")
    if len(ptrs) != len(lens):
        raise ValueError(
            "registration_regions: ptrs and lens must be equally many, "
            f"got {len(ptrs)} and {len(lens)}"
        )
    for i, (ptr, size) in enumerate(zip(ptrs, lens, strict=True)):
        if size and not 0 < ptr <= 2**64 - size:
            raise ValueError(
                "registration_regions: ptrs and lens must be ranges of [1, 2^64), "
                f"got ({ptr}, {size}) at {i}"
            )
    regions = [region for region in dict.fromkeys(zip(ptrs, lens, strict=True)) if region[1]]
    merged = _merged(regions, alignment)
    if alignment > 1 or len(merged) < len(regions):
        regions = merged
    return [ptr for ptr, _ in regions], [size for _, size in regions]


def _merged(regions: list[tuple[int, int]], alignment: int) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for ptr, size in sorted(regions):
        begin, end = merged[-1] if merged else (0, 0)
        meets = ptr // alignment <= -(-end // alignment) if alignment > 1 else ptr < end
        if merged and meets:
            merged[-1] = begin, max(end, ptr + size)
        else:
            merged.append((ptr, ptr + size))
    return [(begin, end - begin) for begin, end in merged]
