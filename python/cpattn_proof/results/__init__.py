# SPDX-License-Identifier: Apache-2.0
"""Results of all ranks, joined by positions and compared with float64.

``expect``       the call of programs: gathers and judges
``rows``         rows of all ranks as one batch, or the fault that prevents it
``judgement``    differences between a batch and attention, and the finding
``rings``        typical faults in merging partial results of ranks
"""
