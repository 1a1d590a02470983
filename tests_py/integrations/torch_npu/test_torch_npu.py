# SPDX-License-Identifier: Apache-2.0
"""The stand-in for torch_npu: put in place and taken away, and what it refuses to replace."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types

import pytest
import torch

from cpattn.integrations import torch_npu

NAMES = {
    *("_npu_fused_infer_attention_score_get_max_workspace", "_npu_reshape_and_cache"),
    *("npu_fused_infer_attention_score", "npu_lightning_indexer", "npu_rotary_mul"),
    *("npu_scatter_nd_update_", "npu_sparse_flash_attention"),
}


def test_installed_removed_and_installed_again():
    with torch_npu.install() as installed:
        first = importlib.import_module("torch_npu")
        assert importlib.util.find_spec("torch_npu") is not None
        with pytest.raises(ImportError, match="a package torch_npu is there already"):
            torch_npu.install()
    installed.remove()  # nothing is left to remove
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torch_npu")
    assert torch.ops.npu.npu_lightning_indexer is first.npu_lightning_indexer  # they stay
    with torch_npu.install():
        second = importlib.import_module("torch_npu")
        assert second is not first
        assert second.npu_lightning_indexer is first.npu_lightning_indexer


def test_names_and_no_device():
    """Programs take `torch.npu` for a device."""
    with torch_npu.install():
        module = importlib.import_module("torch_npu")
        assert set(module.__all__) == NAMES
        for name in NAMES:
            assert callable(getattr(module, name))
            if not name.startswith("_"):
                assert getattr(module, name) is getattr(torch.ops.npu, name)
        assert not hasattr(torch, "npu")


def test_other_names_are_named():
    with torch_npu.install():
        module = importlib.import_module("torch_npu")
        message = "torch_npu is cpattn's stand-in for CPUs and has no npu_rms_norm; it supplies .*"
        with pytest.raises(AttributeError, match=message + "npu_sparse_flash_attention"):
            module.npu_rms_norm  # noqa: B018
        assert not hasattr(module, "npu_scatter_pa_kv_cache")
        with pytest.raises(ImportError, match="cannot import name 'npu_rms_norm'"):
            exec("from torch_npu import npu_rms_norm")
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("torch_npu.contrib")


def test_the_real_package_is_not_hidden(monkeypatch, tmp_path):
    real = types.ModuleType("torch_npu")
    monkeypatch.setitem(sys.modules, "torch_npu", real)
    with pytest.raises(ImportError, match="a package torch_npu is there already"):
        torch_npu.install()
    assert sys.modules["torch_npu"] is real
    monkeypatch.delitem(sys.modules, "torch_npu")
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="a package torch_npu is there already"):
        torch_npu.install()
    assert "torch_npu" not in sys.modules


@pytest.mark.parametrize(
    "program",
    [
        "import sys, cpattn.integrations.torch_npu\n"
        "assert 'torch' not in sys.modules and 'torch_npu' not in sys.modules",
        # Libraries can register operators without the module; then nothing of ours is registered.
        "import sys, torch\n"
        "from cpattn.integrations import torch_npu\n"
        "library = torch.library.Library('npu', 'FRAGMENT')\n"
        "library.define('npu_rotary_mul(Tensor x) -> Tensor')\n"
        "for attempt in range(2):\n"
        "    try:\n"
        "        torch_npu.install()\n"
        "    except ImportError as error:\n"
        "        assert 'torch.ops.npu.npu_rotary_mul is registered already' in str(error)\n"
        "    else:\n"
        "        raise AssertionError('replaced')\n"
        "assert 'torch_npu' not in sys.modules\n"
        "assert not hasattr(torch.ops.npu, 'npu_lightning_indexer')",
    ],
    ids=["import does nothing yet", "operators of the real package are not replaced"],
)
def test_in_a_process_of_its_own(program):
    subprocess.run([sys.executable, "-c", program], check=True)
