# SPDX-License-Identifier: Apache-2.0
"""Reports as one self-contained page of HTML. Needs jinja2."""

from .html import write_html
from .timeline import Stretch

__all__ = ["Stretch", "write_html"]
