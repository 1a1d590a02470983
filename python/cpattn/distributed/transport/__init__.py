# SPDX-License-Identifier: Apache-2.0
"""Transport between the ranks of a group: rows, meetings, shared memory, and missing ranks."""
