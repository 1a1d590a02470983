# SPDX-License-Identifier: Apache-2.0
"""Every kind of text model that transformers has, small and random, with cpattn against eager.

It writes the table of docs/how_to/transformers_models.md (`make families`, some minutes), or prints
the rows of the models that it is given.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from family_models import Family, over_ranks, quietly
from rich.progress import track
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cpattn.integrations import transformers as integration
from support.distributed.distributed_worker import run_world
from support.tolerances import TOLERANCES

PARTS = ("prompt", "padding", "generate", "static cache")
BATCHES = "continuous batching"
RANKS = "two ranks"


class Outcome(NamedTuple):
    """Outcome of one part of one model.

    "yes": logits or tokens of eager attention, "own": the same, as the model computes attention
    itself and never asks; "differs", "refused" by a ValueError of cpattn, "fails" by another
    error; "-" where eager attention fails, too.
    """

    word: str
    reason: str = ""


class Calls:
    """Count of how often models asked for attention under the names of cpattn."""

    def __init__(self) -> None:
        self.count = 0
        for name in ("attention", "paged_attention_forward"):  # what register() finds by name
            setattr(integration, name, self._counting(getattr(integration, name)))
        integration.register()

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def attention(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return function(*arguments, **options)

        return attention


def text_models() -> list[str]:
    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING)


def compare(expected: torch.Tensor, compute: Callable[[], torch.Tensor]) -> Outcome:
    try:
        got = quietly(compute)
    except (ValueError, NotImplementedError) as error:
        return Outcome("refused", first_line(error))
    except Exception as error:
        return Outcome("fails", first_line(error))
    if expected.shape != got.shape:
        return Outcome("differs", f"in shape, {list(got.shape)}")
    if not expected.is_floating_point():
        return Outcome("yes" if torch.equal(expected, got) else "differs")
    # Where eager attention has NaN, as XLM behind padding, so must ours.
    unit = torch.finfo(torch.float32).eps * expected.nan_to_num(0).abs().max()
    allowed = float(TOLERANCES["logits of a model", "float32"] * unit)
    if torch.allclose(expected, got, rtol=0, atol=allowed, equal_nan=True):
        return Outcome("yes")
    off = (expected - got).nan_to_num(torch.inf).abs().max() / unit
    return Outcome("differs", f"by {float(off):.0f} units")


def try_part(family: Family, part: str, calls: Calls) -> Outcome:
    try:
        expected = quietly(lambda: family.compute(part, "eager"))
    except Exception as error:
        return Outcome("-", first_line(error))
    return asked(calls, lambda: compare(expected, lambda: family.compute(part, "cpattn")))


def asked(calls: Calls, outcome: Callable[[], Outcome]) -> Outcome:
    """Return "own" for "yes" of a model that did not ask."""
    before = calls.count
    result = outcome()
    return Outcome("own") if result.word == "yes" and calls.count == before else result


def try_batches(family: Family, calls: Calls, expected: torch.Tensor) -> Outcome:
    """Try continuous batching by cpattn; "-" if transformers' own fails as well."""

    def paged() -> torch.Tensor:
        with integration.use_paged(family.model):
            return family.batched()

    outcome = asked(calls, lambda: compare(expected, paged))
    if outcome.word in ("yes", "own"):
        return outcome
    family.model.set_attn_implementation("eager")
    own = compare(expected, family.batched)
    return outcome if own.word == "yes" else Outcome("-", f"eager: {own.word} {own.reason}")


def try_ranks(model_type: str, expected: torch.Tensor) -> Outcome:
    """Try `ContextParallelModel` on two ranks."""

    def computed() -> torch.Tensor:
        with tempfile.TemporaryDirectory() as folder:
            preload = over_ranks.__module__
            found, _ = run_world(2, Path(folder), over_ranks, model_type, preload=preload)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    return compare(expected, computed)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def try_model(model_type: str, calls: Calls) -> dict[str, Outcome] | str:
    """Return the outcome of each part, or why there is no such model here."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        return _outcomes(model_type, calls)
    finally:
        logging.disable(disabled)


def _outcomes(model_type: str, calls: Calls) -> dict[str, Outcome] | str:
    try:
        family = quietly(lambda: Family(model_type))
    except Exception as error:
        return first_line(error)
    outcomes = {part: try_part(family, part, calls) for part in PARTS}
    try:
        expected = quietly(family.one_by_one)
    except Exception as error:
        return outcomes | dict.fromkeys((BATCHES, RANKS), Outcome("-", first_line(error)))
    outcomes[BATCHES] = try_batches(family, calls, expected)
    return outcomes | {RANKS: try_ranks(model_type, expected)}


PAGE = Path(__file__).parents[1] / "docs" / "how_to" / "transformers_models.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
COLUMNS = (*PARTS, BATCHES, RANKS)
Tried = Mapping[str, Mapping[str, Outcome] | str]


def try_all(names: list[str]) -> dict[str, Mapping[str, Outcome] | str]:
    calls = Calls()
    return {
        name: try_model(name, calls)
        for name in track(names, "Models", disable=not sys.stderr.isatty())
    }


def reasons(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return what stands in a row behind its words, each reason once."""
    said = [x.reason for x in outcomes.values() if x.word not in ("yes", "own", "-")]
    return [reason.replace("|", "\\|") for reason in dict.fromkeys(said) if reason]


def table(tried: Tried) -> str:
    lines = [f"| model | {' | '.join(COLUMNS)} | |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, outcomes in tried.items():
        if isinstance(outcomes, str):
            continue
        words = " | ".join(outcomes[part].word for part in COLUMNS)
        lines.append(f"| {name} | {words} | {'; '.join(reasons(outcomes))} |")
    return "\n".join(lines) + "\n"


def summary(tried: Tried) -> str:
    built = [outcomes for outcomes in tried.values() if not isinstance(outcomes, str)]
    words = [{x.word for part, x in row.items() if part != RANKS} for row in built]
    ranks = [row[RANKS].word for row in built]
    asking = [row for row in words if "yes" in row]
    right = sum(row <= {"yes", "own", "-"} for row in asking)
    return (
        f"transformers {transformers.__version__}: {len(tried)} types, {len(built)} of them built. "
        f"{len(asking)} get attention from cpattn, {right} of these wherever eager attention "
        f"does it at all; {sum('refused' in row for row in words)} are refused. "
        f"{ranks.count('yes')} run over two ranks, which refuse {ranks.count('refused')}.\n"
    )


def not_built(tried: Tried) -> str:
    names = [name for name, outcomes in tried.items() if isinstance(outcomes, str)]
    return f"\nNot built small by the script: {', '.join(names)}.\n" if names else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="types of models; default: all")
    names = parser.parse_args().models
    torch.set_num_threads(1)
    tried = try_all(names or text_models())
    text = f"{summary(tried)}\n{table(tried)}{not_built(tried)}"
    if names:
        print(text)
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
