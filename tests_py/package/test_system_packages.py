# SPDX-License-Identifier: Apache-2.0
"""make asks for nobody's root: what the system lacks is one line, and `make system` runs it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.places import ROOT

INSTALL = "apt-get install -y --no-install-recommends"


@pytest.fixture
def system_packages(tmp_path):
    """Runs the script for a user, where apt-get and sudo only note that they were called."""
    log = tmp_path / "calls"

    def run(*arguments, user):
        tools = {
            "id": f"echo {user}",
            "dpkg": '[ "$2" = there ]',
            "apt-get": f'echo apt-get "$@" >>{log}',
            "sudo": f'echo sudo >>{log}; exec "$@"',
        }
        for name, script in tools.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
        log.write_text("")
        done = subprocess.run(
            ["scripts/system_packages.sh", *arguments],
            cwd=ROOT,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )
        return done, log.read_text().splitlines()

    return run


def test_a_user_is_told_and_nothing_is_installed(system_packages):
    done, calls = system_packages("demo", sys.executable, "there", "missing", user=1000)
    assert done.returncode == 1
    assert "`make system` installs them" in done.stderr
    assert f"  sudo {INSTALL} missing\n" in done.stderr
    assert not calls
    done, calls = system_packages("demo", sys.executable, "there", user=1000)
    assert (done.returncode, done.stdout, done.stderr, calls) == (0, "", "", [])


@pytest.mark.parametrize(("option", "user"), [(["--install"], 1000), ([], 0)])
def test_sudo_or_root_installs_and_says_so(system_packages, option, user):
    done, calls = system_packages(*option, "demo", sys.executable, "missing", user=user)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Installing as root: {INSTALL} missing\n"
    if user:
        update, install = "apt-get update -qq", f"{INSTALL} -qq missing"
        assert calls == ["sudo", update, "sudo", install]
    else:
        assert calls == ["apt-get update -qq", f"{INSTALL} -qq missing"]
