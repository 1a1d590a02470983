# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for flash-attn, FlashInfer and torch_npu are installed and removed, hiding nothing."""

import importlib
import importlib.util
import sys
import types

import pytest

from cpattn.integrations import flash_attn, flashinfer, torch_npu

# Package, one of its modules, and a name in that, of each stand-in.
PACKAGES = [
    (flash_attn, "flash_attn.flash_attn_interface", "flash_attn_varlen_func"),
    (flashinfer, "flashinfer.prefill", "BatchPrefillWithPagedKVCacheWrapper"),
    (flashinfer, "flashinfer", "merge_state"),
    (torch_npu, "torch_npu", None),
]


@pytest.mark.parametrize(("integration", "module", "name"), PACKAGES)
def test_installed_and_removed_and_nothing_is_hidden(
    integration, module, name, monkeypatch, tmp_path
):
    package = module.partition(".")[0]
    there = f"a package {package} is there already"
    with integration.install() as installed:
        found = importlib.import_module(module)
        assert name is None or getattr(found, name) is getattr(integration, name)
        assert importlib.util.find_spec(package) is not None
        with pytest.raises(ImportError, match=there):
            integration.install()
    installed.remove()  # nothing is left to remove
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(package)

    real = types.ModuleType(package)
    monkeypatch.setitem(sys.modules, package, real)
    with pytest.raises(ImportError, match=there):
        integration.install()
    assert sys.modules[package] is real
    monkeypatch.delitem(sys.modules, package)
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=there):
        integration.install()
    assert package not in sys.modules


def test_imports_do_not_import_torch(children):
    program = "import sys\nfrom cpattn.integrations import flash_attn, flashinfer, torch_npu\n"
    program += "assert not {'torch', 'torch_npu'} & set(sys.modules)"
    children.python(program)
