# SPDX-License-Identifier: Apache-2.0
"""KV transfers of sglang 0.5.23 as it is published: refuted by the linter, and proved once mended.

Its own configurator makes the pools, and its own manager the descriptors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cpattn.integrations import sglang as plugin
from cpattn.proof import lint
from cpattn.proof.linting.adapters.transfers import joined
from support.proof.shipped import assert_proved, assert_refuted_as_written, shipped_entry
from support.sglang import sglang_servers
from support.sglang.installed import MARKS
from support.sglang.sglang_servers import ascend_pool, document_of, plain_pool

pytestmark = MARKS
STAGES = (range(7), range(7, 15))
EVEN = {"head_dim": 32, "v_head_dim": 32}
NARROW = {"head_dim": 192, "v_head_dim": 128}


@pytest.fixture(scope="module")
def sglang() -> SimpleNamespace:
    return sglang_servers.load()


@pytest.fixture(autouse=True)
def configured(sglang, monkeypatch) -> Iterator[None]:
    for variable in ("CPATTN_PLUGINS", "CPATTN_SGLANG_PARTS", "ASCEND_USE_FIA"):
        monkeypatch.delenv(variable, raising=False)
    with sglang_servers.configured(sglang):
        yield
    plugin.uninstall()


def two_stages(sglang: SimpleNamespace) -> dict[str, Any]:
    """A prefill of 7 and 8 layers, to a decode that has all of them."""
    decode = ascend_pool(sglang, range(15), **EVEN)
    pools = [ascend_pool(sglang, layers, **EVEN) for layers in STAGES]
    stages = (document_of(sglang, x, decode, f"stage {i}", pp_size=2) for i, x in enumerate(pools))
    return joined(list(stages))


def test_27740_values_of_a_stage_go_to_keys_of_other_layers(sglang):
    """`get_mha_kv_ptrs_with_pp`, mended by the plug-in's part ``strict_kv``."""
    entry = shipped_entry("sgl-project/sglang#27740", "lint")
    report = lint(two_stages(sglang))
    assert_refuted_as_written(report, entry)
    kinds = {found.kind for found in report.findings}
    assert kinds == {"xfer-pair", "xfer-overlap", "xfer-missing"}
    plugin.install("strict_kv")
    assert_proved(lint(two_stages(sglang)), entry)


def narrow_values(sglang: SimpleNamespace, make_decode: Any) -> dict[str, Any]:
    """A model whose values are narrower than its keys, prefilled on Ascend."""
    prefill = ascend_pool(sglang, range(2), **NARROW)
    return document_of(sglang, prefill, make_decode(sglang, range(2), **NARROW), "prefill")


def test_39058_pages_of_values_are_as_long_as_those_of_keys(sglang, monkeypatch):
    """`_build_ascend_mha_kv_pool` leaves out `v_head_dim`; `_build_mha_kv_pool` beside it has it.

    Two servers on Ascend are wrong alike, and what they send each other fits.
    """
    entry = shipped_entry("sgl-project/sglang#39058", "lint")
    prefill = ascend_pool(sglang, range(2), **NARROW)
    key = sglang_servers.PAGE_SIZE * 2 * 192 * 2  # tokens, heads, dim, bytes
    assert prefill.get_contiguous_buf_infos()[2] == [key] * 4
    assert_refuted_as_written(lint(narrow_values(sglang, plain_pool)), entry)
    assert lint(narrow_values(sglang, ascend_pool)).proved

    pools, mended = sglang.npu_pools, partial(sglang.npu_pools.NPUMHATokenToKVPool, v_head_dim=128)
    monkeypatch.setattr(pools, "NPUMHATokenToKVPool", mended)
    for make_decode in (plain_pool, ascend_pool):
        assert_proved(lint(narrow_values(sglang, make_decode)), entry)
