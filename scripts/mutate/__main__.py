# SPDX-License-Identifier: Apache-2.0
"""Changes sources of cpattn, one operator, constant, bound or statement at a time, and tells which
changes no test notices.

The release build must be there. What is found is kept in a journal: a run that was stopped goes on
where it was, and after a change of a test only those mutants are tried again that it killed or let
pass. Changes that make no difference are listed, with the reason, in the file of verdicts. The
status is 0 if the share of the others that tests notice is high enough.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from mutate.build import build
from mutate.campaign import Campaign, Entry, Journal
from mutate.operators import Mutant
from mutate.report import Verdicts, print_report

ROOT = Path(__file__).parents[2]
SOURCES = (
    "cpp/base/prefix_sums.cc",
    "cpp/meta/*/*.cc",
    "python/cpattn/transfer/**/*.py",
    "python/cpattn/context_parallel/[fgms]*.py",
    "python/cpattn/distributed/plans/*.py",
)
# Those that are quick and have to do with the sources; which reach what is measured.
TESTS = [
    "test_bounded_calls.py",
    "test_context_parallel.py",
    "test_context_parallel_[gps]*.py",
    "test_distributed_plan.py",
    "test_dsa_metadata*.py",
    "test_fia_errors.py",
    "test_halo.py",
    "test_key_shares.py",
    "test_kv_[adhlosw]*.py",
    "test_kv_p[ao][gi]*.py",
    "test_local_engine.py",
    "test_mesh.py",
    "test_paged_attention_errors.py",
    "test_pcp_layout.py",
    "test_plan_kv_*.py",
    "test_send_*.py",
    "test_shard_*.py",
    "test_topk_transform.py",
    "test_transfer_*.py",
    "test_units.py",
    "test_values.py",
    "test_weighted_split.py",
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutate", description=__doc__)
    add = parser.add_argument
    add("sources", nargs="*", help="files to change, below --root (default: all that have plans)")
    add("--sample", type=int, default=20, metavar="N", help="mutants of each file (default: 20)")
    add("--seed", type=int, default=1, help="of the sample (default: 1)")
    add("--jobs", type=int, default=1, help="mutants at a time (default: 1)")
    add("--bar", type=float, default=90.0, metavar="PERCENT", help="least score (default: 90)")
    add("--tests", action="append", metavar="PATTERN", help="files below tests_py; again for more")
    add("--root", type=Path, default=ROOT, help="the project (default: this one)")
    add("--release", type=Path, help="its build (default: build/release)")
    add("--folder", type=Path, help="for what is made (default: build/mutation)")
    add("--verdicts", type=Path, help="default: tests_py/mutation/verdicts.toml")
    return parser.parse_args()


def sampled(mutants: dict[int, Mutant], count: int, seed: int) -> list[int]:
    """As many of each file, and files take turns.

    What is chosen first does not depend on the others: a smaller sample is part of a larger one,
    and hardly another after a change of the source.
    """

    def chance(number: int) -> bytes:
        return hashlib.sha256(repr((seed, mutants[number].key)).encode()).digest()

    turns: list[tuple[int, str, int]] = []
    for path in sorted({mutant.path for mutant in mutants.values()}):
        numbers = [number for number, mutant in mutants.items() if mutant.path == path]
        chosen = sorted(numbers, key=chance)[:count]
        turns += [(turn, path, number) for turn, number in enumerate(chosen)]
    return [number for _, _, number in sorted(turns)]


def main() -> int:
    options = arguments()
    root: Path = options.root.resolve()
    folder: Path = options.folder or root / "build" / "mutation"
    release: Path = options.release or root / "build" / "release"
    verdicts = Verdicts(options.verdicts or root / "tests_py" / "mutation" / "verdicts.toml")
    sources = [path for pattern in SOURCES for path in sorted(root.glob(pattern))]
    if options.sources:
        sources = [root / path for path in options.sources]
    tests = sorted(
        {path for pattern in options.tests or TESTS for path in root.glob(f"tests_py/**/{pattern}")}
    )
    made = build(root, release, folder, sources, options.jobs)
    chosen = sampled(made.mutants, options.sample, options.seed)
    print(f"{len(chosen)} of {len(made.mutants)} mutants, seed {options.seed}", flush=True)
    journal = Journal(folder / "journal.jsonl")
    with Campaign(made, [str(path.relative_to(root)) for path in tests], options.jobs) as campaign:
        campaign.run(chosen, journal)
    entries: list[Entry] = [journal.entries[made.mutants[number].key] for number in chosen]
    return 0 if print_report(entries, verdicts, options.bar) else 1


if __name__ == "__main__":
    sys.exit(main())
