# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: its metadata, by cpattn and by engines, and ranks at work."""
