# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers."""
