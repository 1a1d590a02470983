# SPDX-License-Identifier: Apache-2.0
"""Modules that tests share: what is of every subject, and a folder for a subject or an engine;
`api` has a good call of every public function, and what may not stand for arguments."""
