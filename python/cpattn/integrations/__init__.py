# SPDX-License-Identifier: Apache-2.0
"""One module for each foreign system, imported only when asked for."""
