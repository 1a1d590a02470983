# SPDX-License-Identifier: Apache-2.0
"""Modules that tests share: some for every subject, and a folder for each subject or engine; `api`
has a valid call of every public function, and invalid arguments."""
