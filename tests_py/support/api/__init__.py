# SPDX-License-Identifier: Apache-2.0
"""Calls of the public functions: good calls, wrong and hostile arguments, and a fuzzer."""
