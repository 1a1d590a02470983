# SPDX-License-Identifier: Apache-2.0
"""How everything here is measured, whatever it is: nothing is timed before it is right.

A `comparison.Comparison` is one job in several implementations. `runner` checks the result of each,
then takes samples in turns, so that what the machine does meanwhile hits all alike; `sampling` has
the rules. Figures are medians with the width of the middle half, as percent of the peak that the
machine reached during the same samples. `contender` puts an implementation into a process of its
own, `worker` is the other end of its pipes. `program` is the command line and keeps results,
`report` and `figures` say them in words, `accuracy` has what a right result is.
"""
