# SPDX-License-Identifier: Apache-2.0
"""Audit of a run of the tests: what it did, what it left out, and what it left behind.

`machine` knows what this machine has, `skips` which tests may be skipped for what it lacks,
`records` writes down what ran, `table` prints that of several runs and misses what should have run,
`leftovers` finds processes and shared memory that a run did not clean up.
"""
