# SPDX-License-Identifier: Apache-2.0
"""The unmodified DSA path of sglang on Ascend over gloo ranks, in float64: the operators of the
indexer and of sparse attention are from this library."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cpattn_proof import lint
from cpattn_proof.linting.adapters.dsa import from_row_metadata
from cpattn_proof.linting.adapters.selections import from_topk
from support.distributed.prefill_batches import Case, make_batch
from support.sglang.installed import MARKS
from support.tolerances import EPS, assert_close, indexer_units, to_float64

pytestmark = MARKS

SIZES = {"num_kv_heads": 1, "head_dim": 64, "v_head_dim": 16, "dtype": torch.bfloat16}
BATCHES = [
    Case("one request", (61,), page_size=16, **SIZES),
    Case("a cached prefix (#23268)", (50,), (77,), page_size=16, **SIZES),
    Case("a batch", (40, 17, 33), (0, 90, 5), page_size=16, **SIZES),
    Case("pages of 128", (45, 20), (140, 3), page_size=128, **SIZES),
]
CASES = [
    replace(case, name=f"{strategy}: {case.name}", strategy=strategy)
    for strategy in ("zigzag", "interleave")
    for case in BATCHES
]
WORLD = ("support.sglang.sglang_dsa_worker", CASES)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def new_tokens(case: Case):
    ends = enumerate(zip(case.prefixes, case.seq_lens, strict=True))
    visible = [(s, n + 1) for s, (prefix, end) in ends for n in range(prefix, end)]
    return [(s, length, row) for row, (s, length) in enumerate(visible)]


def scores_of(answer, s, length):
    """Return the scores of the keys that a token sees, and their largest rounding error."""
    q, k, weights = (x.double() for x in answer["index_vectors"][s])
    q, k, weights = q[length - 1], k[:length], weights[length - 1]
    largest = (weights.abs() @ (q.abs() @ k.abs().T)).max()
    rounding = indexer_units(len(q)) * EPS["float32"] * largest
    return weights @ torch.relu(q @ k.T), rounding


@each_case
def test_every_token_gets_the_highest_scores_of_its_own_keys(answers, case):
    topk_indices = answers[0][case.name]["topk_indices"]
    topk = topk_indices.shape[1]
    for s, length, row in new_tokens(case):
        scores, rounding = scores_of(answers[0][case.name], s, length)
        chosen = topk_indices[row, : min(topk, length)].long()
        assert torch.all(topk_indices[row, length:] == -1)
        assert len(chosen.unique()) == len(chosen)
        assert set(chosen.tolist()) <= set(range(length))
        assert scores[chosen].min() >= scores.topk(len(chosen)).values[-1] - 2 * rounding
    for answer in answers[1:]:
        assert torch.equal(answer[case.name]["topk_indices"], topk_indices)


@each_case
def test_the_linter_proves_metadata_and_selections_of_all_ranks(answers, case):
    of_ranks = [answer[case.name] for answer in answers]
    local = [answer["local_q_indices"].tolist() for answer in of_ranks]
    metadata = [SimpleNamespace(**answer) for answer in of_ranks]
    lens = list(case.extend_lens), list(case.prefixes)
    arguments = local, *lens, of_ranks[0]["tables"]
    report = lint(from_row_metadata(metadata, *arguments, page_size=case.page_size))
    assert report.findings == ()
    assert set(report.checked) >= {"OWN", "COV", "LEN", "PAD"}
    tokens, chosen = new_tokens(case), of_ranks[0]["topk_indices"]
    rows, indices, scores = [], [], []
    for mine in local:
        rows.append(([tokens[i][0] for i in mine], [tokens[i][1] - 1 for i in mine]))
        indices.append(chosen[mine].tolist())
        scores.append([scores_with_rounding(of_ranks[0], *tokens[i]) for i in mine])
    options = {"topk": chosen.shape[1], "scores": scores}
    report = lint(from_topk(*lens, rows, indices, **options))
    assert report.findings == ()
    assert report.checked == ("TOPK",)


def scores_with_rounding(answer, s, length, row):
    """Return scores of the keys that a token sees, with selected ones raised by rounding."""
    scores, rounding = scores_of(answer, s, length)
    chosen = answer["topk_indices"][row]
    scores[chosen[chosen >= 0].long()] += 2 * rounding
    return scores.tolist()


@each_case
def test_attention_is_that_of_the_chosen_keys_in_float64(answers, case):
    batch = make_batch(case)
    answer = answers[0][case.name]
    out = answer["out"].double()
    for s, _, row in new_tokens(case):
        chosen = answer["topk_indices"][row]
        latents, rope = (x[s][chosen[chosen >= 0].long(), 0].double() for x in (batch.k, batch.v))
        scores = batch.q[row].double() @ latents.T + answer["q_rope"][row].double() @ rope.T
        weights = (scores * (case.head_dim + case.v_head_dim) ** -0.5).softmax(-1)
        expected, magnitude = (to_float64(weights @ x) for x in (latents, latents.abs()))
        assert_close(out[row], expected, magnitude, "attention", "bfloat16")
    for other in answers[1:]:
        assert torch.equal(other[case.name]["out"], answer["out"])
