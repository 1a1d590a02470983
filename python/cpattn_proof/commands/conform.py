# SPDX-License-Identifier: Apache-2.0
"""`cpattn conform`: an attention operator of anyone, tried."""

from __future__ import annotations

from pathlib import Path

import click

from cpattn_terminal.command_group import CommandGroup, refusals_by_option
from cpattn_terminal.options import Integer, Number

from .options import require_option
from .page_option import html_option, write_page

CommandGroup.examples["conform"] = "cpattn conform my_kernels:attention --signature sdpa"

_EXAMPLES, _SEED = Integer(0, 100_000), Integer(0, 1 << 32)
_SECONDS = Number(0.1, 86_400)


@click.command(short_help="Try an attention operator, and name what is wrong with it.")
@click.argument("operator", metavar="MODULE:FUNCTION")
@click.option(
    "--signature", required=True, metavar="NAME",
    help="Calling convention of the operator: cpattn, sdpa, flash_attn_varlen, "
    "flash_attn_with_kvcache, flashinfer, npu_fused_infer_attention_score or transformers; topk, "
    "indexer_topk or dcp_local_indices if it selects keys; or MODULE:ADAPTER of your own.",
)  # fmt: skip
@click.option(
    "--without", multiple=True, metavar="FEATURE",
    help="Feature that the operator lacks: softcap, sinks, lse, far, float16; may be repeated.",
)  # fmt: skip
@click.option(
    "--examples", type=_EXAMPLES, default=150, show_default=True,
    help="Number of generated cases; cases at the edges come first.",
)  # fmt: skip
@click.option(
    "--seconds", type=_SECONDS, default=45, show_default=True,
    help="Approximate time for all cases; those at the edges always run.",
)  # fmt: skip
@click.option(
    "--seed", type=_SEED, default=0, show_default=True, help="Seed of the generated cases."
)
@click.option(
    "--device", default="cpu", show_default=True, help="Device of the tensors, as torch names it."
)
@click.option(
    "--time-limit", type=_SECONDS, default=10, show_default=True,
    help="Time that a call may take, in seconds.",
)  # fmt: skip
@require_option
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output, for programs."
)
@html_option
def conform(
    operator: str, signature: str, without: tuple[str, ...], examples: int, seconds: float,
    seed: int, device: str, time_limit: float, required: tuple[str, ...], as_json: bool,
    html_path: Path | None,
) -> None:  # fmt: skip
    """Try an attention operator on many batches, and name what is wrong with it; or one that
    selects keys, on many scores.

    It is called by its SIGNATURE, in a process of its own, on batches with lengths at every edge,
    prefixes, shuffled pages, rows without keys, windows, softcaps, sinks, grouped heads, 16-bit
    numbers, and NaN where nothing may be read. Where results differ from attention in float64, they
    are held against attention that is wrong in known ways; the report names the one that fits, as
    lse-base-2 or window-off-by-one, with the smallest case that shows it.

    Exit code 0 if nothing is wrong, 1 if something is, 2 if the operator cannot be imported,
    answers fewer than half of the cases, or --require names what was not checked. Modules of the
    working directory are found.

    \b
    torch's operator, as on this machine:
      cpattn conform torch.nn.functional:scaled_dot_product_attention \\
          --signature sdpa
    A selection of keys for sparse attention:
      cpattn conform cpattn.sparse.sglang_0_5_23:fast_topk --signature topk
    Your own, which has no sinks; for a program:
      cpattn conform my_kernels:attention --signature flash_attn_varlen \\
          --without sinks --json
    """
    from cpattn_terminal.progress import make_progress

    from ..conformance.runner import conform as run
    from ..findings import NotUsable

    try:
        with refusals_by_option(), make_progress("cpattn conform", "cases") as progress:
            report = run(
                operator, signature=signature, without=without, examples=examples, seconds=seconds,
                seed=seed, device=device, time_limit=time_limit,
                require=required, progress=progress,
            )  # fmt: skip
    except NotUsable as error:
        raise click.UsageError(str(error)) from None
    click.echo(report.to_json() if as_json else report.text())
    write_page([report], html_path)
    click.get_current_context().exit(report.exit_code)
