# SPDX-License-Identifier: Apache-2.0
"""Modules that tests share: cases with what is right for them, and processes that are tested.

Here is what tests of every subject use: `cases` and `tolerances` of attention, `children` and the
command line as processes that end with their test, `time_limits`, `probes` for a
single wrong value, `stand_ins` for packages that are not there, `places` in the source tree. A
subject or an engine has a folder, such as `transfer` or `vllm`; `api` has a good call of every
public function, and what may not stand for its arguments.
"""
