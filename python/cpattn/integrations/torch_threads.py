# SPDX-License-Identifier: Apache-2.0
"""Calls on the threads of torch's operators: `set_thread_pool`."""

from ._torch_threads import set_thread_pool

__all__ = ["set_thread_pool"]
