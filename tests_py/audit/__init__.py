# SPDX-License-Identifier: Apache-2.0
"""What a run of the tests did, what it left out, and what it left behind.

`leftovers` finds processes and shared memory that a run did not clean up.
"""
