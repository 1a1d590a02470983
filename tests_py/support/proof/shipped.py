# SPDX-License-Identifier: Apache-2.0
"""Checks that the tools' findings in code of releases are still those in the zoo."""

from cpattn_proof import Report
from cpattn_proof.zoo import ZooEntry, all_entries


def shipped_entry(bug: str, tool: str) -> ZooEntry:
    (entry,) = [e for e in all_entries() if (e.bug, e.tool) == (bug, tool)]
    assert entry.shipped is not None
    return entry


def assert_refuted_as_written(report: Report, entry: ZooEntry) -> None:
    """Check that the first finding has the entry's invariant, and begins as in the zoo."""
    assert entry.shipped is not None
    found = report.findings[0]
    assert found.invariant == entry.invariant
    assert found.what.startswith(entry.shipped.says), found.what


def assert_proved(report: Report, entry: ZooEntry) -> None:
    assert report.proved, report.text()
    assert entry.invariant in report.checked
