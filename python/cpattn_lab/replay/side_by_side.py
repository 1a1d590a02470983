# SPDX-License-Identifier: Apache-2.0
"""Several computations by torch at once, each on its share of the CPUs."""

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
    """The results of `function` for all items, in their order.

    Threads that each compute an item alone do not wait for each other within it, which costs more
    than half of the time where other processes have some of the CPUs.

    Parameters
    ----------
    sizes : ints
        How large each item is; the largest come first.
    at_once : int
        The sizes of items that are computed at the same time add up to no more, but for a single
        one: what each needs of memory is there at once.
    stop : callable
        Called when an item has failed or Ctrl-C has come; what is being computed is waited for.
    """
    cpus = torch.get_num_threads()
    workers = min(len(items), cpus, max(at_once // max(sizes, default=1), 1))
    if workers <= 1:
        return [function(item) for item in items]
    share = cpus // workers

    def compute(item: Item) -> Result:
        with num_threads(share):
            return function(item)

    # Where torch has OpenMP, this is the number of the thread that says it, and of new ones.
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
