# SPDX-License-Identifier: Apache-2.0
"""The folder for the library `kernels` can be loaded as that library does, beside the package."""

import importlib.util
import json
import sys
import zipfile

import build_hub_kernel
import numpy as np
import pytest
import torch

import cpattn
from cpattn.integrations import flash_attn


def import_kernel(variant):
    """Load the package of a variant under its identifier, as kernels/importer.py does."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def files():
    return build_hub_kernel.files_of_checkout()


@pytest.fixture(scope="module")
def variant(files, tmp_path_factory):
    return build_hub_kernel.write(files, tmp_path_factory.mktemp("kernel"))


@pytest.fixture(scope="module")
def kernel(variant):
    return import_kernel(variant)


def normal(*shape):
    return torch.randn(shape)


OPTIONS = {"softmax_scale": 0.3, "window_size": (3, 2), "softcap": 5.0}
OPTIONS["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.125, 0.0])
OPTIONS["s_aux"] = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16)


def same(mine, theirs):
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("causal", [True, False])
def test_its_functions_are_those_of_the_package(kernel, causal):
    torch.manual_seed(0)
    q, k, v = normal(2, 5, 4, 32), normal(2, 9, 2, 32), normal(2, 9, 2, 32)
    asked = {**OPTIONS, "causal": causal, "return_attn_probs": True}
    same(kernel.flash_attn_func(q, k, v, **asked), flash_attn.flash_attn_func(q, k, v, **asked))
    rows, ends = [x.flatten(0, 1) for x in (q, k, v)], torch.tensor([0, 3, 10]).int()
    ragged = (*rows, ends, torch.tensor([0, 7, 18]).int(), 7, 11)
    same(
        kernel.flash_attn_varlen_func(*ragged, **asked),
        flash_attn.flash_attn_varlen_func(*ragged, **asked),
    )
    pages = k.view(6, 3, 2, 32), v.view(6, 3, 2, 32)
    asked = {**OPTIONS, "causal": causal, "return_softmax_lse": True}
    asked["cache_seqlens"] = torch.tensor([4, 8])
    asked["block_table"] = torch.tensor([[5, 1, 3], [0, 2, 4]])
    same(
        kernel.flash_attn_with_kvcache(q, *pages, **asked),
        flash_attn.flash_attn_with_kvcache(q, *pages, **asked),
    )


def test_factors_are_numbers_under_any_default_dtype(kernel):
    q, k = normal(1, 5, 4, 32), normal(1, 9, 2, 32)
    factors = {"k_descale": 1, "v_descale": 0.3}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        out = kernel.flash_attn_func(q, k, k, **factors)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(out, flash_attn.flash_attn_func(q, k, k, **factors))


def test_graphs_hold_its_operators(kernel):
    """The function opcheck also compares traced shapes with shapes from the kernels."""
    namespace = getattr(torch.ops, kernel.__name__)
    q, ends = normal(6, 4, 32), torch.tensor([0, 2, 6])
    batch = q[None].contiguous()
    calls = [
        (namespace.flash_attn_func, (batch, batch, batch), {"causal": True}),
        (namespace.flash_attn_varlen_func, (q, q, q, ends, ends, 4, 4), {}),
        (namespace.flash_attn_with_kvcache, (batch, batch.clone(), batch.clone()), {}),
    ]
    for operator, arguments, options in calls:
        torch.library.opcheck(operator, arguments, options)
    attend = torch.compile(
        lambda x: kernel.flash_attn_func(x, x, x, causal=True, window_size=(2, 0)) * 2,
        backend="aot_eager",
        fullgraph=True,
    )
    expected = flash_attn.flash_attn_func(batch, batch, batch, causal=True, window_size=(2, 0))
    assert torch.equal(attend(batch), expected * 2)


def test_classes_of_both_copies(kernel):
    own = sys.modules[f"{kernel.__name__}.{build_hub_kernel.PACKAGE}"]
    batch = {"q_lens": [2], "kv_lens": [2], "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    batch |= {"page_size": 2, "num_pages": 1, "block_tables": [[0]]}
    for package in (own, cpattn):
        with package.profile() as recorded:
            plan = package.plan_attention(**batch)
        assert type(plan) is package.AttentionPlan
        assert recorded.events.dtype.names[:3] == ("begin", "end", "flops")
    q, cache = np.zeros((2, 2, 16), np.float32), np.zeros((1, 2, 2, 16), np.float32)
    assert own.run_attention(own.plan_attention(**batch), q, cache, cache).shape == q.shape
    with pytest.raises(TypeError, match="plan must be an AttentionPlan"):
        own.run_attention(cpattn.plan_attention(**batch), q, cache, cache)


def test_it_runs_where_cpattn_cannot_be_imported(variant, children):
    program = f"""
import sys
sys.modules["cpattn"] = None
sys.path.insert(0, {str(variant.parent)!r})
kernel = __import__({variant.name!r})
import torch
print(kernel.flash_attn_func(*[torch.ones(1, 2, 1, 16)] * 3).sum().item(), kernel.__version__)
"""
    assert children.python(program).stdout.split() == ["32.0", cpattn.__version__]


def test_the_same_sources_make_the_same_bytes(files, variant, tmp_path):
    again = build_hub_kernel.write(files, tmp_path)
    names = {path.relative_to(again) for path in again.rglob("*") if path.is_file()}
    assert {(again / name).read_bytes() == (variant / name).read_bytes() for name in names} == {
        True
    }
    assert json.loads((again / "metadata.json").read_text())["name"] == "cpattn-flash-attn"
    changed = build_hub_kernel.write({**files, "merge.py": b""}, tmp_path)
    assert changed == again
    assert (again / "metadata.json").read_text() != (variant / "metadata.json").read_text()


def test_wheels_of_one_release_and_processor(files, tmp_path):
    wheels = [tmp_path / "one.whl", tmp_path / "two.whl"]
    second = {name.replace("_core.cpython-3", "_core.cpython-4"): files[name] for name in files}
    for wheel, content in zip(wheels, [files, second], strict=True):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("cpattn-0.1.0.dist-info/METADATA", "")
            for name in content:
                archive.writestr(f"cpattn/{name}", content[name])
    assert build_hub_kernel.files_of_wheels(wheels) == files | second
    with zipfile.ZipFile(wheels[1], "a") as archive:
        archive.writestr("cpattn/new.py", "1")
    with zipfile.ZipFile(wheels[0], "a") as archive:
        archive.writestr("cpattn/new.py", "2")
    with pytest.raises(SystemExit, match=r"two\.whl has another new\.py than"):
        build_hub_kernel.files_of_wheels(wheels)
    with pytest.raises(SystemExit, match=r"extensions must be for one processor, got \[\]"):
        build_hub_kernel.write({}, tmp_path)
    two = [f"_core.cpython-311-{name}-linux-gnu.so" for name in ("x86_64", "aarch64")]
    with pytest.raises(SystemExit, match=r"got \['aarch64', 'x86_64'\]"):
        build_hub_kernel.write(dict.fromkeys(two, b""), tmp_path)
