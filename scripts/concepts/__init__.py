# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/concepts, drawn from objects of the library."""
