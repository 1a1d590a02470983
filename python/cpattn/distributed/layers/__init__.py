# SPDX-License-Identifier: Apache-2.0
"""One layer of attention over ranks: writes, exchanges, and the computation of each rank."""
