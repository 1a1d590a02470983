# SPDX-License-Identifier: Apache-2.0
"""libcpattn as ctypes sees it, and the cases of the program in C."""
