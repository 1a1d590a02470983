# SPDX-License-Identifier: Apache-2.0
"""Suites of other projects, whose cases run on cpattn: `make test-outside`.

A suite has an adapter in this folder, which only translates arguments: pip installs the release in
`expected.toml`, or `archive` fetches its sources, by a hash. If a case starts to pass or to fail,
the run fails until a person changes the count there.
"""
