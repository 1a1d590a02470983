# SPDX-License-Identifier: Apache-2.0
"""Reports on a replay: a table, JSON, and an HTML document with plots.

``summary`` prints and writes JSON, with ``decode`` for disaggregated serving; ``html`` fills the
template beside it with ``plots``. Imports rich, and for HTML jinja2 and matplotlib.
"""
