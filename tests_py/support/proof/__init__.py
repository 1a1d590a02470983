# SPDX-License-Identifier: Apache-2.0
"""What tests of the proof tools have in common."""
