# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for modules that sglang imports on a CPU compute nothing."""

import os
import sys

from support.children import path_with

NAMES = """
import os, sys
from cpattn.integrations.sglang import cpu_engine

def error_of(program):
    try:
        exec(program)
    except (AttributeError, ImportError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"

with cpu_engine.install():
    from torchvision.transforms.functional import InterpolationMode
    from torchvision.transforms import functional
    import transformers.utils
    assert InterpolationMode.BICUBIC.value == "bicubic"
    assert os.environ["SGLANG_USE_CPU_ENGINE"] == "1"
    assert not transformers.utils.is_torchvision_available()
    for program in (
        "import torchvision; torchvision.ops",
        "from torchvision.transforms import Resize",
        "functional.resize",
        "from sgl_kernel import copy_all_layer_kv_cache_cpu; copy_all_layer_kv_cache_cpu(1, 2)",
        "import sgl_kernel; sgl_kernel.silu_and_mul",
        "import sgl_kernel.scalar_type",
        "import torch; torch.ops.sgl_kernel.decode_attention_cpu",
    ):
        print(error_of(program))
assert "torchvision" not in sys.modules and "sgl_kernel" not in sys.modules
"""

ERRORS = [
    ("AttributeError", "torchvision", "cpattn's stand-in", "has no ops", "InterpolationMode"),
    ("ImportError", "Resize"),
    ("AttributeError", "torchvision", "cpattn's stand-in", "has no resize"),
    ("NotImplementedError", "sgl_kernel.copy_all_layer_kv_cache_cpu", "cpattn's stand-in"),
    ("AttributeError", "sgl_kernel", "cpattn's stand-in", "has no silu_and_mul"),
    ("ModuleNotFoundError", "sgl_kernel.scalar_type"),
    ("AttributeError", "sgl_kernel", "decode_attention_cpu"),
]


def run(children, program, *folders):
    environment = os.environ | {"PYTHONPATH": path_with(*folders)}
    return children.run([sys.executable, "-W", "ignore", "-c", program], env=environment)


def test_what_is_absent_is_named(children):
    done = run(children, NAMES)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(ERRORS)
    for line, parts in zip(lines, ERRORS, strict=True):
        assert all(part in line for part in parts), line


TOO_LATE = """
import os, sys, types
from cpattn.integrations.sglang import cpu_engine

sys.modules["sglang.srt.utils"] = types.ModuleType("sglang.srt.utils")
for engine in "01":
    os.environ["SGLANG_USE_CPU_ENGINE"] = engine
    try:
        cpu_engine.install()
        print("installed")
    except RuntimeError as error:
        print(str(error).partition("must be called before sglang is imported")[1])
import sgl_kernel, torchvision
print(sgl_kernel.mine, hasattr(torchvision, "InterpolationMode"))
"""


def test_after_sglang_it_is_too_late_and_what_is_installed_is_not_hidden(tmp_path, children):
    (tmp_path / "sgl_kernel.py").write_text("mine = True\n")
    done = run(children, TOO_LATE, tmp_path)
    lines = ["must be called before sglang is imported", "installed", "True True"]
    assert done.stdout.splitlines() == lines, done.stderr
