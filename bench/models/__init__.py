# SPDX-License-Identifier: Apache-2.0
"""Measures of bench_models.py: a whole model in one process, and over ranks by the engine.

``process``   a peer in processes of its own, asked over pipes: transformers alone, or an engine
``peers``     which there are
``steps``     prompts and decode steps, checked and then timed in turns
``forecast``  what the cost model predicts for them
``trace``     requests of a trace through `submit` and `step`
"""
