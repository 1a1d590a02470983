# SPDX-License-Identifier: Apache-2.0
"""Calls of the public functions: good ones, wrong and hostile arguments, and a fuzzer of them."""
