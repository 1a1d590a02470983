# SPDX-License-Identifier: Apache-2.0
"""Check of the ranks of several machines, for `torchrun`: ``-m cpattn_lab.check``.

``command``  the options, the checks and the clock
``batch``    the batches that are attended to, in every way there is
``measure``  rates of the network and of merging, also for `cpattn plan --calibrate`
``report``   what rank 0 prints
"""
