# SPDX-License-Identifier: Apache-2.0
"""What a type checker says to a user of the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from support.places import ROOT

pytestmark = pytest.mark.slow


# Each line that is wrong says which kind of error it is.
PROGRAM = """
import numpy as np
import torch
from numpy.typing import NDArray

import cpattn

q, cache = torch.ones(3, 2, 16), torch.ones(4, 8, 1, 16)
mask = np.ones(30, np.bool_)
array = np.ones((3, 2, 16), np.float32)
plan = cpattn.plan_attention(q_lens=[3], kv_lens=np.array([10]), block_tables=[[2, 0]], page_size=8,
                             num_pages=4, num_heads=2, num_kv_heads=1, head_dim=16)
metadata = cpattn.build_cp_metadata([3], (10,), cp_rank=0, cp_size=1)


def lse_if(asked: bool) -> None:
    cpattn.run_attention(plan, q, cache, cache, return_lse=asked)


out: torch.Tensor = cpattn.run_attention(plan, q, cache, cache)
out, lse = cpattn.run_attention(plan, q, cache, cache, return_lse=True)
own: NDArray[np.float32] = cpattn.run_attention(plan, array, cache, cache)
out = cpattn.paged_attention(q, cache, cache, q_lens=range(3), kv_lens=[10], custom_mask=mask)
out, lse = cpattn.merge_state(out, lse, out, lse)
out = cpattn.do_cp_attn_fia(q, cache, cache, metadata, block_tables=torch.ones(1, 2), page_size=8,
                            num_heads=2, num_kv_heads=1)
out = metadata.unshard([metadata.shard(q)])
size: int = cpattn.kv.MHATokenToKVPool(
    size=64, page_size=8, num_layers=1, num_kv_heads=1, head_dim=16
).get_key_buffer(0).shape[0]

cpattn.run_attention(plan, [[[1.0]]], cache, cache)  # call-overload
cpattn.run_attention(plan, q, cache, cache, scale="1")  # call-overload
cpattn.run_attention(metadata, q, cache, cache)  # call-overload
cpattn.paged_attention(q, cache, cache, q_lens=[3.0])  # list-item
cpattn.paged_attention(q, cache, cache, q_lens="3")  # call-overload arg-type
cpattn.can_apply_cp([3], 2)  # call-arg misc
out = cpattn.run_attention(plan, q, cache, cache, return_lse=True)  # assignment
out = cpattn.run_attention(plan, array, cache, cache)  # type-var assignment
"""


@pytest.mark.timeout(900)
def test_a_strict_type_checker_tells_right_calls_from_wrong_ones(tmp_path):
    pytest.importorskip("torch")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"]
    command += ["--follow-imports=silent", "--hide-error-context", f"--cache-dir={tmp_path}/cache"]
    environment = os.environ | {"MYPYPATH": str(ROOT / "python")}
    run = subprocess.run(
        [*command, str(program)], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert not run.stderr
    found: dict[int, set[str]] = {}
    for line, code in re.findall(r"^program\.py:(\d+): error: .*\[([\w-]+)\]$", run.stdout, re.M):
        found.setdefault(int(line), set()).add(code)
    lines = enumerate(PROGRAM.splitlines(), start=1)
    expected = {n: line.partition("  # ")[2].split() for n, line in lines if "  # " in line}
    assert found.keys() == expected.keys(), run.stdout
    assert all(codes <= set(expected[n]) for n, codes in found.items()), run.stdout
