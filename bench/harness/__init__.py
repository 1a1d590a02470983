# SPDX-License-Identifier: Apache-2.0
"""The common rules of all measurements: nothing is timed before its result is right.

A `comparison.Comparison` is one job in several implementations. `runner` checks the result of each,
then takes samples in turns, so that other load hits all alike; `sampling` has the rules. Figures
are medians with the width of the middle half, as percent of the peak that the machine reached
during the same samples. `contender` runs an implementation in its own process, `worker` is the
other end of its pipes. `program` is the command line and keeps results, `report` and `figures`
print them in words, `accuracy` defines right results.
"""
