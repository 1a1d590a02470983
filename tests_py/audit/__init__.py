# SPDX-License-Identifier: Apache-2.0
"""Audit of a run of the tests: passed tests, skips, and leftovers."""

import pytest


def fail_run(session: pytest.Session, what: str, text: str) -> None:
    report = pytest.TestReport(
        nodeid=what,
        location=(what, None, what),
        keywords={},
        outcome="failed",
        longrepr=text,
        when="teardown",
    )
    session.config.hook.pytest_runtest_logreport(report=report)
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
