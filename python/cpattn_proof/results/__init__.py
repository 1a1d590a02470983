# SPDX-License-Identifier: Apache-2.0
"""Results of all ranks, put together by positions and held against float64.

``expect``       what programs call: gathers, and says what is wrong
``rows``         the rows of all ranks as one batch, or why they are none
``judgement``    where a batch differs from attention, and the finding
``rings``        ways in which parts that ranks merge go wrong
"""
