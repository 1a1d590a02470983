# SPDX-License-Identifier: Apache-2.0
"""Terminal kit of commands: streams, progress, tables, exit codes, and rates as options.

Every part of the package that prints may import from here; nothing here knows a command.
"""
