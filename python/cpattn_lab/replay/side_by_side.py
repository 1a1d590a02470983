# SPDX-License-Identifier: Apache-2.0
"""Parallel computations by torch, each on its share of the CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from cpattn._threads import num_threads

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    sizes: Sequence[int],
    *,
    at_once: int,
    stop: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Return the results of `function` for all items, in order.

    Threads that each compute one item alone do not wait for each other within it; such waits cost
    more than half of the time if other processes use some of the CPUs.

    Parameters
    ----------
    sizes : ints
        Size of each item; the largest come first.
    at_once : int
        Limit on the total size of items computed at the same time, except for a single item; it
        bounds their memory.
    stop : callable
        Called when an item has failed or on Ctrl-C; running computations are awaited.
    """
    cpus = torch.get_num_threads()
    workers = min(len(items), cpus, max(at_once // max(sizes, default=1), 1))
    if workers <= 1:
        return [function(item) for item in items]
    share = cpus // workers

    def compute(item: Item) -> Result:
        with num_threads(share):
            return function(item)

    # torch with OpenMP sets the number for this thread, and for new ones.
    pool = ThreadPoolExecutor(workers, "cpattn check", lambda: torch.set_num_threads(share))
    try:
        order = sorted(range(len(items)), key=lambda i: -sizes[i])
        waiting = {i: pool.submit(compute, items[i]) for i in order}
        return [waiting[i].result() for i in range(len(items))]
    except BaseException:
        stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(cpus)
