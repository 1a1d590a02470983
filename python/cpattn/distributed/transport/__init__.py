# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group reach each other: rows, meetings, shared memory, and who is missing."""
