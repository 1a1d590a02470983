# SPDX-License-Identifier: Apache-2.0
"""Suites of other projects, whose cases run on cpattn: `make test-outside`.

A suite is a module of this folder, its adapter, which only translates arguments: pip installs the
release that `expected.toml` names, or `archive` fetches its sources, by a hash. A case that starts
to pass, or to fail, fails the run until a person changes its count there.
"""
