# SPDX-License-Identifier: Apache-2.0
"""Calls of CUDA, done by the CPU, so that programs for GPUs can run between communication.

Tensors of CUDA are marked tensors of the CPU; streams do their work at once. Each rank sees as many
devices as there are ranks.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_iter

from ...findings import NotUsable

NAME = "CPU in place of CUDA"
_MEMORY = 80 << 30  # bytes of a device
_ABOUT_CUDA = re.compile(r"cuda|nvtx|accelerator|pin_memory|pinned", re.IGNORECASE)
_DOES_NOTHING = (
    "empty_cache", "init", "ipc_collect", "reset_accumulated_memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached", "reset_peak_memory_stats",
    "set_per_process_memory_fraction", "synchronize",
)  # fmt: skip
_NO_BYTES = (
    "max_memory_allocated", "max_memory_cached", "max_memory_reserved", "memory_allocated",
    "memory_cached", "memory_reserved",
)  # fmt: skip
_TRUE = ("can_device_access_peer", "is_available", "is_bf16_supported", "is_initialized")
_REFUSED = ("CUDAGraph", "cudart", "graph", "make_graphed_callables")
_MARK = "_cpattn_is_of_cuda"


class Ranks(Protocol):
    """Interface of a run for the calls of CUDA."""

    size: int

    @property
    def rank(self) -> int: ...
    @property
    def failure(self) -> BaseException | None: ...
    def fail(self, failure: BaseException) -> NoReturn: ...


class CudaAsCpu:
    """Decides whether the CPU does calls of CUDA in a simulation.

    Parameters
    ----------
    wanted : bool or None
        Whether the CPU does them. None: if there is no device and a rank fails for lack of one.
    """

    def __init__(self, wanted: bool | None) -> None:
        self.is_on = bool(wanted)
        self.is_used = False
        self._may_turn_on = wanted is None and not torch.cuda.is_available()
        self._asked = False

    def should_turn_on(self, failure: BaseException | None) -> bool:
        """Tell whether to repeat a failed run with calls of CUDA on the CPU."""
        if self.is_on or not self._may_turn_on or failure is None:
            return False
        return self._asked or is_about_cuda(failure)

    def changes(self, run: Ranks) -> list[tuple[Any, str, Any]]:
        """Return the replacements for a run: owners, names and stand-ins."""
        if self.is_on:
            return _stand_ins(run, self)
        return [
            (torch.cuda, name, self._noting(getattr(torch.cuda, name)))
            for name in ("device_count", "is_available")
            if self._may_turn_on
        ]

    def of_rank(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the thread makes tensors on the CPU, for any device name."""
        return _TensorsOnCpu(self) if self.is_on else contextlib.nullcontext()

    def _noting(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*arguments: Any, **options: Any) -> Any:
            self._asked = True
            return ask(*arguments, **options)

        return asked


def is_about_cuda(error: BaseException) -> bool:
    """Tell whether an error is about the lack of CUDA."""
    kinds = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)
    return isinstance(error, kinds) and bool(_ABOUT_CUDA.search(_text_of(error)))


def _text_of(error: BaseException) -> str:
    return " ".join(word for word in error.args if isinstance(word, str))


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


class _TensorsOnCpu(TorchFunctionMode):
    """Mode of torch that makes tensors on the CPU, and copies them as a device would."""

    def __init__(self, cuda: CudaAsCpu) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return _is_marked(args[0])
        if func is torch.Tensor.pin_memory:
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return self._to_cuda(args[0], args[0])
        if func in (torch.Tensor.to, torch.Tensor.cpu):
            return self._moved(func, args, kwargs)
        names_cuda = _is_cuda(kwargs.get("device"))
        if names_cuda:
            kwargs["device"] = "cpu"
            self._cuda.is_used = True
        result = func(*args, **kwargs)
        if names_cuda or (self._cuda.is_used and _any_marked((args, kwargs))):
            for tensor in tree_iter(result):
                _mark(tensor)
        return result

    def _moved(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensor, *others = args
        targets = [*others, *kwargs.values()]
        if any(_is_cuda(target) or _is_marked(target) for target in targets):
            others = ["cpu" if _is_cuda(other) else other for other in others]
            kwargs = {name: "cpu" if _is_cuda(one) else one for name, one in kwargs.items()}
            return self._to_cuda(tensor, func(tensor, *others, **kwargs))
        result = func(*args, **kwargs)
        if not _is_marked(tensor):
            return result
        # A torch.device may come from a tensor, which is on the CPU: then nothing moves.
        if func is torch.Tensor.cpu or any(isinstance(one, str) for one in targets):
            return tensor.clone() if result is tensor else result
        _mark(result)
        return result

    def _to_cuda(self, tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Return the result, marked as on the device; a copy if it is the host's tensor itself."""
        self._cuda.is_used = True
        if result is tensor and not _is_marked(tensor):
            result = tensor.clone()
        _mark(result)
        return result


def _has_storage(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided


def _mark(tensor: Any) -> None:
    """Mark the memory of a tensor as a device's; its storage object lives as long as the memory."""
    if _has_storage(tensor):
        setattr(tensor.untyped_storage(), _MARK, True)


def _is_marked(tensor: Any) -> bool:
    return _has_storage(tensor) and getattr(tensor.untyped_storage(), _MARK, False)


def _any_marked(arguments: Any) -> bool:
    return any(map(_is_marked, tree_iter(arguments)))


class Stream:
    """Stream that does its work at once."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority, self.cuda_stream = torch.device("cpu"), priority, 0

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self, *_: Any) -> None:
        """Do nothing, as all work is done."""

    wait_event = wait_stream = synchronize


class Event:
    """Point in time of the process."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) * 1e3

    def query(self) -> bool:
        return True

    def synchronize(self, *_: Any) -> None:
        """Do nothing, as all work is done."""

    wait = synchronize


def _stand_ins(run: Ranks, cuda: CudaAsCpu) -> list[tuple[Any, str, Any]]:
    current: dict[int, int] = {}
    streams: dict[int, Stream] = {}
    default = Stream()

    def used(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            cuda.is_used = True
            return function(*arguments, **options)

        return call

    def choose(device: Any) -> None:
        index = _index_of(device)
        if index is not None and index >= run.size:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal: {index} of {run.size} simulated devices"
            )
        if index is not None and index >= 0:
            current[run.rank] = index

    @contextlib.contextmanager
    def on_device(device: Any) -> Iterator[None]:
        before = current.get(run.rank, 0)
        choose(device)
        try:
            yield
        finally:
            current[run.rank] = before

    @contextlib.contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        before = streams.get(run.rank, default)
        streams[run.rank] = stream or before
        try:
            yield
        finally:
            streams[run.rank] = before

    def properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name=NAME, major=8, minor=0, total_memory=_MEMORY, multi_processor_count=108,
            warp_size=32, max_threads_per_multi_processor=2048, is_integrated=False,
        )  # fmt: skip

    def refusal(name: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> NoReturn:
            run.fail(
                NotUsable(
                    f"simulate: rank {run.rank} calls torch.cuda.{name}, for which the CPU cannot "
                    "stand in (--cuda-as-cpu)"
                )
            )

        return refuse

    functions: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "current_device": lambda: current.get(run.rank, 0),
        "current_stream": lambda device=None: streams.get(run.rank, default),
        "default_stream": lambda device=None: default,
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": properties,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "mem_get_info": lambda device=None: (_MEMORY, _MEMORY),
        "memory_stats": lambda device=None: {},
        "memory_summary": lambda device=None, abbreviated=False: "",
        "set_device": choose,
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "set_stream": lambda stream: streams.update({run.rank: stream}),
        **dict.fromkeys(_DOES_NOTHING, lambda *_, **__: None),
        **dict.fromkeys(_NO_BYTES, lambda *_, **__: 0),
    }
    changes: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, used(function)) for name, function in functions.items()),
        *((torch.cuda, name, lambda *_, **__: True) for name in _TRUE),
        *((torch.cuda, name, refusal(name)) for name in _REFUSED),
        (torch.cuda, "device_count", lambda: run.size),
        (torch.cuda, "device", used(on_device)),
        (torch.cuda, "device_of", lambda tensor: contextlib.nullcontext()),
        (torch.cuda, "stream", used(on_stream)),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "Event", Event),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
        (torch, "load", _loading(torch.load)),
        (DeviceContext, "__init__", _entering(DeviceContext.__init__, cuda)),
        *(
            (torch.cuda.nvtx, name, lambda *_, **__: 0)
            for name in ("mark", "range_end", "range_pop", "range_push", "range_start")
        ),
        *(
            (module, "init_process_group", _without_device(c10d.init_process_group, cuda))
            for module in (dist, c10d)
        ),
    ]
    return [change for change in changes if hasattr(change[0], change[1])]


def _index_of(device: Any) -> int | None:
    if isinstance(device, int):
        return device
    return None if device is None else torch.device(device).index


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(file: Any, map_location: Any = None, *arguments: Any, **options: Any) -> Any:
        where = "cpu" if map_location is None or _is_cuda(map_location) else map_location
        return load(file, where, *arguments, **options)

    return loaded


def _entering(begin: Callable[..., None], cuda: CudaAsCpu) -> Callable[..., None]:
    def made(self: Any, device: Any) -> None:
        cuda.is_used = cuda.is_used or _is_cuda(device)
        begin(self, "cpu" if _is_cuda(device) else device)

    return made


def _without_device(begin: Callable[..., Any], cuda: CudaAsCpu) -> Callable[..., Any]:
    """Return `init_process_group` that ignores its device, which this machine may lack."""

    def begun(*arguments: Any, device_id: Any = None, **options: Any) -> Any:
        cuda.is_used = cuda.is_used or device_id is not None
        return begin(*arguments, **options)

    return begun
