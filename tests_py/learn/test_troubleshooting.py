# SPDX-License-Identifier: Apache-2.0
"""Every message that docs/troubleshooting.md quotes is really printed."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import types
import warnings
from collections.abc import Callable

import numpy as np
import pytest

import cpattn
from cpattn import _core, torch_guard
from cpattn.scheduling import PrefixCache
from support.children import path_with
from support.places import ROOT, TESTS

pytestmark = pytest.mark.slow  # children that import torch, a dozen

PAGE = ROOT / "docs" / "troubleshooting.md"
LEFT_OUT = "…"

Q = np.zeros((3, 4, 64), np.float32)
CACHE = np.zeros((8, 16, 2, 64), np.float32)


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return f"{caught.type.__name__}: {caught.value}"


def attend(q=Q, cache=CACHE, **changes):
    lens = {"q_lens": [3], "kv_lens": [20], "block_tables": [[1, 2]]} | changes
    return cpattn.paged_attention(q, cache, cache, **lens)


class OnDevice:
    """Tensor that claims to be on a GPU."""

    device = "cuda:0"

    def __dlpack__(self, **_):
        capsule = Q.__dlpack__()
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
        pointer_of.restype = ctypes.c_void_p
        behind_data = pointer_of(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
        ctypes.c_int32.from_address(behind_data).value = 2  # the type of the device: CUDA
        return capsule


def requiring_gradients() -> str:
    torch = pytest.importorskip("torch")
    return message_of(lambda: attend(torch.zeros(3, 4, 64, requires_grad=True)))


def guarded() -> str:
    """Return the messages on a machine with half-exposed AMX, before and after importing torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core, "amx_usable", lambda: True)
        patch.setattr(_core, "amx_palette_missing", lambda: True)
        patch.setattr(_core, "has_avx512_fp16", lambda: True)
        said = []
        for modules in ({}, {"torch": types.ModuleType("torch")}):
            patch.setattr(os, "environ", {})
            patch.setattr(torch_guard, "sys", types.SimpleNamespace(modules=modules))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                said.append(torch_guard.prepare())
            said += [f"{x.category.__name__}: {x.message}" for x in caught]
    return "\n".join(said)


def child(code: str, **environment: str) -> str:
    environment = {**os.environ, "PYTHONPATH": path_with(), **environment}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    return run.stdout + run.stderr


RANK = """
import datetime, sys, torch, torch.distributed as dist
from cpattn.distributed import ContextParallel

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
seconds = datetime.timedelta(seconds=30)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=seconds)
cp = ContextParallel(dist.group.WORLD, page_size=16)
cache = torch.zeros(64, 2, 16)
for length in (20 + rank, 20)[: 2 - rank]:  # rank 1 is gone at the second
    plan = cp.plan([length], block_tables=[[0, 1]])
    rows = torch.zeros(len(plan.metadata.local_q_indices), 2, 16)
    try:
        cp.write_kv(plan, rows, rows, cache, cache.clone())
    except RuntimeError as error:
        print(f"RuntimeError: {error}", flush=True)
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, module_children):
    pytest.importorskip("torch")
    store = tmp_path_factory.mktemp("ranks") / "store"
    environment = {**os.environ, "PYTHONPATH": path_with(), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", RANK]
    ranks = [module_children.start([*command, rank, store], env=environment) for rank in "01"]
    printed, _ = zip(*(rank.communicate(timeout=120) for rank in ranks), strict=True)
    return "".join(printed)


def without(module: str, code: str) -> str:
    return child(f"import sys; sys.modules['{module}'] = None; import cpattn\n{code}")


def with_old_compiler() -> str:
    command = ["sh", "scripts/system_packages.sh", "test", sys.executable]
    environment = {**os.environ, "CXX": "false"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stderr


def in_cmake() -> str:
    """Read the file as one line, with variables left as they are."""
    text = (ROOT / "cmake" / "Dependencies.cmake").read_text()
    return re.sub(r'"\s+"', "", text)


def in_package(name: str) -> str:
    return (ROOT / "python" / name).read_text()


def asserted_in(test: str) -> str:
    """Return the text of a test that sees the message for real."""
    return (TESTS / test).read_text()


POOL = cpattn.kv.MHATokenToKVPool(
    size=64, page_size=16, num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32"
)

#: Functions that give the messages of a section, by its heading; "two_ranks" is a fixture.
SOURCES: dict[str, list[Callable[[], str]]] = {
    "torch dies with an illegal instruction in bfloat16": [
        lambda: str(signal.strsignal(signal.SIGILL)),
        guarded,
    ],
    "Threads get in each other's way": [
        lambda: child(
            "import numpy, cpattn; cache = numpy.zeros((1, 16, 1, 16), 'f4')\n"
            "cpattn.paged_attention(cache[0], cache, cache, q_lens=[16], kv_lens=[16],\n"
            "                       block_tables=[[0]])",
            CPATTN_NUM_THREADS="many",
        )
    ],
    "An instruction set is forced that the machine has not": [
        lambda: child("import cpattn; cpattn.active_isa()", CPATTN_ISA="avx9")
    ],
    "A page id is outside the cache": [
        lambda: message_of(lambda: attend(block_tables=[[1, 8]])),
        lambda: message_of(lambda: attend(block_tables=[[1]])),
    ],
    "Out of pages": [
        lambda: message_of(
            lambda: PrefixCache(8, page_size=16, block_tokens=512).acquire([1, 2], 1000)
        ),
        lambda: message_of(lambda: POOL.set_kv_buffer(0, [2000], CACHE[0, :1], CACHE[0, :1])),
    ],
    "Page sizes do not agree": [lambda: message_of(lambda: attend(page_size=32))],
    "kv_lens without the new tokens": [lambda: message_of(lambda: attend(kv_lens=[2]))],
    "A tensor requires a gradient": [requiring_gradients],
    "A dtype is refused": [
        lambda: message_of(lambda: attend(Q.astype(np.float64))),
        lambda: message_of(lambda: attend(cache=CACHE.astype(np.float16))),
        lambda: message_of(lambda: attend(Q.astype(np.uint16))),
        lambda: without(
            "ml_dtypes",
            "cpattn.kv.MHATokenToKVPool(size=64, page_size=16, num_layers=1, num_kv_heads=2,\n"
            "                           head_dim=64, dtype='bfloat16', container='numpy')",
        ),
    ],
    "A tensor is not on the CPU": [lambda: message_of(lambda: attend(OnDevice()))],
    "Mooncake's libraries are missing": [
        lambda: without(
            "mooncake.engine",
            "from cpattn.integrations.mooncake import MooncakeEngine; MooncakeEngine()",
        )
    ],
    "The compiler is too old": [with_old_compiler, in_cmake],
    "Something is missing that an extra brings": [
        lambda: without("rich.table", "with cpattn.profile() as x: pass\nx.table()"),
        lambda: without("click", "from cpattn_terminal.main import main; main()"),
    ],
    "Ranks wait for each other": [lambda: asserted_in("distributed/test_deployment.py")],
    "The plug-in is not active": [lambda: in_package("cpattn/integrations/vllm/backend.py")],
    "Ctrl-C takes a while, or does nothing": [lambda: in_package("cpattn_terminal/main.py")],
}
OF_RANKS = {"A rank did not answer", "Ranks differ"}
#: Messages of libgomp, torch and gloo.
FOREIGN = {
    "libgomp cannot create threads",
    "A data loader dies with a bus error: /dev/shm is small",
    "There is no such network card",
}


def quoted() -> list[tuple[str, str]]:
    sections = re.split(r"^### (.+)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return [
        (heading, message)
        for heading, section in zip(sections[::2], sections[1::2], strict=True)
        for message in re.findall(r'^```text title="Message"\n(.*?)\n```$', section, re.M | re.S)
    ]


def prints(text: str, message: str) -> bool:
    parts = map(re.escape, message.split(LEFT_OUT))
    return re.search(".*".join(parts), text, re.DOTALL) is not None


@pytest.mark.parametrize("heading", SOURCES)
def test_messages_are_printed(heading):
    messages = [message for title, message in quoted() if title == heading]
    assert messages
    text = "\n".join(source() for source in SOURCES[heading])
    assert [message for message in messages if not prints(text, message)] == [], text[:4000]


@pytest.mark.parametrize("heading", sorted(OF_RANKS))
def test_messages_of_ranks_are_printed(heading, two_ranks):
    (message,) = [message for title, message in quoted() if title == heading]
    assert prints(two_ranks, message), two_ranks


def test_no_message_is_left_out():
    assert {heading for heading, _ in quoted()} == {*SOURCES, *OF_RANKS, *FOREIGN}
    blocks = re.findall(r"^```text.*$", PAGE.read_text(), re.MULTILINE)
    assert len(blocks) == len(quoted())
    assert prints("a\nValueError: f: b, got 3\n", "ValueError: f: …, got 3")
    assert not prints("ValueError: f: b, got 3", "ValueError: f: …, got 4")


def test_every_section_has_a_fix():
    text = PAGE.read_text()
    sections = re.split(r"^### .+$", text.split("\n## ", 1)[1], flags=re.MULTILINE)[1:]
    for section in sections:
        assert re.search(r"\*\*(Fix\.|Cause)|^\| Cause", section, re.M), section
