# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: a command ``bench_<subject>.py`` for each subject, and a folder with its parts.

The commands put the folder above this one on the path, in place of their own.
"""
