# SPDX-License-Identifier: Apache-2.0
"""Report on KV transfer and decoding; empty if there was none."""

from __future__ import annotations

from typing import Any

from ..records import DecodeReport, ReplayReport


def summarize_decode(report: ReplayReport) -> dict[str, Any] | None:
    """Return the figures of KV transfer and decoding; times in seconds."""
    decode = report.decode
    if decode is None:
        return None
    transfers = decode.transfers
    blocks = sum(transfer.num_blocks for transfer in transfers)
    sent = sum(transfer.num_bytes for transfer in transfers)
    seconds = sum(transfer.seconds for transfer in transfers)
    return {
        "links": report.options.num_ranks * report.options.decode_ranks,
        "pages": sum(transfer.num_pages for transfer in transfers),
        "blocks": blocks,
        "bytes": sent,
        "mean_block_bytes": sent / max(blocks, 1),
        "plan_seconds": sum(transfer.plan_seconds for transfer in transfers),
        "transfer_seconds": seconds,
        "bytes_per_second": sent / seconds,
        "cached_rate": decode.cached_tokens / report.input_tokens,
        "seconds_to_second_token": _mean_way(decode),
        "tokens": decode.num_tokens,
        "steps": decode.num_steps,
        "step_seconds": decode.step_seconds,
        "pool_bytes": sum(decode.pool_bytes),
        "pool_bytes_per_rank": max(decode.pool_bytes, default=0),
        "sent_bytes": decode.sent_bytes,
        "tokens_per_second": decode.num_tokens / decode.step_seconds if decode.num_steps else 0.0,
    }


def _mean_way(decode: DecodeReport) -> dict[str, float]:
    """Return mean seconds of requests to their second token: prefill, transfer and step."""
    ways = [request for request in decode.requests if len(request.tokens) > 1]
    return {
        part: sum(getattr(way, f"{part}_seconds") for way in ways) / max(len(ways), 1)
        for part in ("prefill", "transfer", "step")
    }


def decode_figures(report: ReplayReport) -> list[tuple[str, str]]:
    """Return the summary of decoding as (name, text) lines."""
    s = summarize_decode(report)
    if s is None:
        return []
    way = {part: f"{1e3 * mean:,.1f} ms" for part, mean in s["seconds_to_second_token"].items()}
    return [
        (
            "KV transfer",
            f"{s['bytes'] / 2**20:,.1f} MiB in {s['blocks']:,} blocks of "
            f"{s['mean_block_bytes'] / 1024:,.1f} KiB on average, over {s['links']} link(s) at "
            f"{s['bytes_per_second'] / 1e6:,.0f} MB/s, planned in {1e3 * s['plan_seconds']:,.1f} "
            f"ms; {100 * s['cached_rate']:.1f} % of the prompt tokens were in the decode pool",
        ),
        (
            "decode",
            f"{s['tokens']:,} tokens in {s['steps']:,} steps of "
            f"{1e3 * s['step_seconds'] / max(s['steps'], 1):,.1f} ms: "
            f"{s['tokens_per_second']:,.0f} tokens/s" + _shares(s, report.options.decode_ranks),
        ),
        (
            "second token",
            f"prefill {way['prefill']}, transfer {way['transfer']}, decode {way['step']} (mean)",
        ),
    ]


def _shares(summary: dict[str, Any], num_ranks: int) -> str:
    """Say how much ranks that decode together hold and send."""
    if num_ranks == 1:
        return ""
    return (
        f", over {num_ranks} ranks with {summary['pool_bytes_per_rank'] / 2**20:,.1f} MiB of KV "
        f"pool each, which sent each other {summary['sent_bytes'] / 2**20:,.1f} MiB"
    )


def tokens_checked(report: ReplayReport) -> str:
    """Return the part on decoded tokens of the check's sentence."""
    decode = report.decode
    if decode is None:
        return ""
    right = decode.checked_tokens - decode.wrong_tokens - decode.near_ties
    text = f"; {right:,} of {decode.checked_tokens:,} next tokens are those of one process"
    if decode.near_ties:
        text += f", {decode.near_ties:,} as good but for roundings"
    if decode.wrong_tokens:
        text += f", {decode.wrong_tokens:,} WRONG"
    return text + f", error while decoding {decode.max_error:.1e}"
