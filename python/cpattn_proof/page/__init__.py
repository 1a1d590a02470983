# SPDX-License-Identifier: Apache-2.0
"""Reports as one page of HTML, which loads nothing from elsewhere. Needs jinja2."""

from .html import write_html
from .timeline import Stretch

__all__ = ["Stretch", "write_html"]
