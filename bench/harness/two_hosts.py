# SPDX-License-Identifier: Apache-2.0
"""Two hosts of one machine, which not every process may make."""

from __future__ import annotations

from cpattn_lab.processes.hosts import Hosts, HostsError


def why_not(link_gbps: float) -> str:
    """Return why two hosts with such a link cannot be made here; nothing if they can."""
    try:
        with Hosts(2, link_gbps=link_gbps):
            return ""
    except HostsError as error:
        return str(error)
