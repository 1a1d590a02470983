# SPDX-License-Identifier: Apache-2.0
"""Private names of torch that a simulation needs, and differences between its releases.

Other modules do not depend on the release. Importing this module raises `NotUsable` if torch lacks
a name without a stand-in here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, cast

import torch
from torch.distributed import distributed_c10d as c10d

from ...findings import NotUsable

#: Names that every release from 2.6 to 2.15 has, by module.
NEEDED = {
    "torch._C": ("_DisableTorchDispatch",),
    "torch._C._distributed_c10d": ("Store", "_set_thread_isolation_mode"),
    "torch.autograd.profiler": ("_disable_profiler", "_enable_profiler", "_prepare_profiler"),
    "torch.distributed.distributed_c10d": (
        "Backend", "BackendConfig", "GroupMember", "_World", "_backend",
        "_default_pg_init_method", "_find_pg_by_ranks_and_tag", "_get_default_timeout",
        "_group_count",
        "_new_process_group_helper", "_pg_backend_config", "_pg_group_ranks", "_pg_map",
        "_pg_names", "_pg_to_tag", "_register_process_group", "_store_based_barrier",
        "_tags_to_pg", "_world", "rendezvous",
    ),
    "torch.nn": ("Buffer", "Parameter"),
    "torch.overrides": ("TorchFunctionMode",),
    "torch.utils._device": ("DeviceContext",),
    "torch.utils._python_dispatch": ("TorchDispatchMode",),
    "torch.utils._pytree": ("tree_iter", "tree_leaves"),
}  # fmt: skip
#: Name that some of these releases have; `register` can do without it.
OPTIONAL = {"torch.distributed.distributed_c10d": ("_register_pg_in_world",)}


def _check() -> None:
    for module, names in NEEDED.items():
        for name in names:
            if not hasattr(import_module(module), name):
                raise NotUsable(
                    f"simulate: torch {torch.__version__} cannot be simulated: it has no "
                    f"{module}.{name}, which releases 2.6 to 2.15 have"
                )


_check()


def register(
    group: Any, name: str, *, backend: str, backend_config: str, store: Any, tag: str | None
) -> None:
    """Register a group with `torch.distributed`, as its own functions do."""
    untyped: Any = c10d
    if hasattr(c10d, "_register_pg_in_world"):  # torch 2.13 and later
        untyped._register_pg_in_world(
            group,
            backend_name=backend,
            store=store,
            group_name=name,
            backend_config=backend_config,
            pg_tag=f"user:{tag}" if tag else None,
            add_to_default_tag=not tag,
        )
        return
    world = untyped._world
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name
    world.pg_backend_config[group] = backend_config
    untyped._register_process_group(name, group)
    tags = (f"user:{tag}",) if tag else ("", f"ptd:{name}")
    for one in tags:
        world.tags_to_pg.setdefault(one, []).append(group)
    world.pg_to_tag[group] = tags[-1]


def isolate_threads(on: bool) -> None:
    """Give each thread its own names in torch's registry of groups, or all threads the same."""
    cast(Any, torch._C._distributed_c10d)._set_thread_isolation_mode(on)


def without_dispatch() -> AbstractContextManager[None]:
    """Return a context in which no mode sees operators."""
    return torch._C._DisableTorchDispatch()
