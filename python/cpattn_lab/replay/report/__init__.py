# SPDX-License-Identifier: Apache-2.0
"""Reports on a replay: a table, JSON, and an HTML document with plots.

``summary`` prints and writes JSON, with ``decode`` for disaggregated serving; ``html`` writes the
document, of ``plots`` and the template beside it. Imports rich, and for HTML jinja2 and matplotlib.
"""
