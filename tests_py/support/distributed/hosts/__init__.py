# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks on one machine that claim to be on several hosts."""
