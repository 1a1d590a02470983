# SPDX-License-Identifier: Apache-2.0
"""Integrations with other systems, one module each, imported only on request."""
