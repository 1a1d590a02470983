# SPDX-License-Identifier: Apache-2.0
"""Processes that are started together and ended together.

``workers``  worker processes, each with a role, which answer calls
``hosts``    hosts on one machine: network namespaces that workers run in

The cost model, the replay and the conformance runner start their processes with these.
"""
