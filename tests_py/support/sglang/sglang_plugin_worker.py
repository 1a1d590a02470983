# SPDX-License-Identifier: Apache-2.0
"""Process of sglang that loads its plug-ins several times, and reports who plans then."""

import json
import logging
import os
import sys
import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch._inductor.compile_fx  # noqa: F401  before there is a stand-in for triton
from transformers import AutoProcessor  # noqa: F401  likewise

from support.sglang.sglang_planning import make_strategy
from support.stand_ins import LackingFinder

sys.meta_path.append(LackingFinder())
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt import plugins


def load_plugins() -> None:
    plugins._plugins_loaded = False
    plugins.load_plugins()


def make_metadata(kind: str) -> Any:
    from sglang.srt.layers.cp import interleave, zigzag

    modules = SimpleNamespace(interleave=interleave, zigzag=zigzag)
    # sglang adds up any numbers of tokens, cpattn refuses negative ones.
    return make_strategy(modules, kind, 0, 2).build_metadata(5, None, [-1, 6])


def choose_topk() -> Any:
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

    backend = SimpleNamespace(dsa_kv_cache_store_fp8=True, dsa_prefill_impl="of tomorrow")
    return DeepseekSparseAttnBackend.get_topk_transform_method(backend)


def group_pages() -> Any:
    from sglang.srt.disaggregation.mooncake.conn import group_concurrent_contiguous

    return group_concurrent_contiguous(np.zeros(2, np.uint8), np.zeros(2, np.uint8))


def filter_pages() -> Any:
    from sglang.srt.disaggregation.common.conn import filter_kv_indices_for_shard_rank

    given = {"kv_indices": np.array([-1]), "index_slice": slice(0, 1)}
    return filter_kv_indices_for_shard_rank(shard_rank=0, shard_size=2, **given)


def match_buffers() -> Any:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    manager = object.__new__(MooncakeKVManager)
    manager.kv_args = SimpleNamespace(prefill_start_layer=3, total_kv_layers=4)
    return manager.get_mha_kv_ptrs_with_pp([0] * 4, [0] * 8)


def who_plans() -> list[str]:
    """Return the jobs that cpattn does, by arguments that cpattn refuses and sglang takes."""
    jobs = {"zigzag": lambda: make_metadata("zigzag")}
    jobs |= {"interleave": lambda: make_metadata("interleave"), "topk": choose_topk}
    jobs |= {"kv": group_pages, "shards": filter_pages, "strict_kv": match_buffers}
    ours = []
    for name, job in jobs.items():
        try:
            job()
        except (TypeError, ValueError):
            ours.append(name)
    if is_backend_known():
        ours.append("attention")
    return ours


def is_backend_known() -> bool:
    """Return whether sglang accepts ``--attention-backend cpattn``, and then finds it."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    times = ATTENTION_BACKEND_CHOICES.count("cpattn")
    assert times == ("cpattn" in ATTENTION_BACKENDS), times
    return times == 1


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
    from cpattn.integrations import sglang as plugin

    answers = {}
    for name, variables in (
        ("filtered by SGLANG_PLUGINS", {"SGLANG_PLUGINS": "another"}),
        ("CPATTN_PLUGINS=0", {"CPATTN_PLUGINS": "0"}),
        ("loaded", {"SGLANG_PLUGINS": "another, cpattn"}),
    ):
        with mock.patch.dict(os.environ, variables):
            load_plugins()
            answers[name] = who_plans()
    load_plugins()
    answers["loaded again"] = who_plans()
    hooks = plugins.HookRegistry._hooks.values()
    answers["hooks per target"] = sorted({len(of_target) for of_target in hooks})
    plugin.uninstall()
    answers["uninstalled"] = who_plans()
    with mock.patch.dict(os.environ, CPATTN_SGLANG_PARTS="strict_kv, metadata"):
        load_plugins()
        answers["CPATTN_SGLANG_PARTS"] = who_plans()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
