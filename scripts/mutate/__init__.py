# SPDX-License-Identifier: Apache-2.0
"""Mutation tests: do the tests notice that the source is wrong?"""
