# SPDX-License-Identifier: Apache-2.0
"""Processes that start and end together.

``workers``  worker processes, each with a role, which answer calls
``hosts``    hosts on one machine: network namespaces for workers

The cost model, the replay and the conformance runner start their processes by these modules.
"""
