# SPDX-License-Identifier: Apache-2.0
"""Access to libcpattn through ctypes, and the cases of the C program."""
