# SPDX-License-Identifier: Apache-2.0
"""build_dsa_metadata in plain Python."""

from __future__ import annotations

RAGGED = {"fp8_kv_cache": True, "prefill_impl": "flashmla_sparse"}
PAGED = {"fp8_kv_cache": False, "prefill_impl": "flashmla_sparse"}
