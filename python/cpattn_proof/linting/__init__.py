# SPDX-License-Identifier: Apache-2.0
"""Refutes or proves the plans of a context-parallel group's ranks, from integers alone.

``document`` reads documents of the published schema, ``model`` converts one to arrays over all
ranks, ``checks`` are the rules, ``linter`` runs them and makes the report. ``pieces`` tells which
queries see which keys, ``memory`` the meaning of an address; ``pictures`` draws bars, ``shrinking``
makes documents smaller. ``adapters`` make documents from plans of engines and libraries.
"""

from .document import SCHEMA, schema
from .linter import lint

__all__ = ["SCHEMA", "lint", "schema"]
