# SPDX-License-Identifier: Apache-2.0
"""Groups on several hosts, as ranks of one machine say that they are."""
