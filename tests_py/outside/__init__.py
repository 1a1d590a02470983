# SPDX-License-Identifier: Apache-2.0
"""Suites of other projects, whose cases run on cpattn: `make test-outside`.

Nothing of a suite is copied: pip installs the release that `expected.toml` names, or `archive`
fetches its sources, and the file that makes the cases has the hash that stands there. A suite is
a module of this folder, its adapter, which only translates arguments: `onnx_attention`,
`onnx_flex_attention` and `torch_opinfo` by `dense.attend`, `vllm_cpu`, `vllm_merge_states` and
`flash_attn` in place of the functions that tests import; `pytest_cases` calls these without
pytest. What cpattn cannot say is not expressible, with a reason. `suite` runs the cases and holds
what came out against the counts of `expected.toml`: a case that starts to pass, or to fail, fails
the run until a person has changed the count.

    python -m outside                    # runs all suites and prints a table
    python -m outside onnx_attention     # one of them
    python -m outside vllm_cpu --all     # all cases of one that has a sample, without counting
    python -m outside --write            # writes docs/proof/outside.md from the counts
"""
