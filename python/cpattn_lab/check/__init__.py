# SPDX-License-Identifier: Apache-2.0
"""Check of the ranks of several machines, for `torchrun`: ``-m cpattn_lab.check``.

``command``  options, checks and timing
``batch``    the checked batches, in every way
``measure``  rates of the network and of merging, also for `cpattn plan --calibrate`
``report``   output of rank 0
"""
