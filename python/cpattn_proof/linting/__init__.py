# SPDX-License-Identifier: Apache-2.0
"""Refutes or proves what the ranks of a context-parallel group planned, from integers alone.

``document`` reads documents of the published schema, ``model`` has one as arrays over all ranks,
``checks`` are what has to hold of it, ``linter`` makes the report of them. ``pieces`` says which
queries see which keys, ``memory`` what an address means; ``pictures`` draws bars, ``shrinking``
makes documents smaller. ``adapters`` make documents of plans of engines and libraries.
"""

from .document import SCHEMA, schema
from .linter import lint

__all__ = ["SCHEMA", "lint", "schema"]
