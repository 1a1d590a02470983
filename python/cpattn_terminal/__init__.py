# SPDX-License-Identifier: Apache-2.0
"""The command `cpattn`, and common parts of its subcommands, such as tables and exit codes.

``main``           entry point, which reports missing packages
``commands``       the command; ``subcommands`` names module and package of each subcommand
``command_group``  errors of commands, and the overview of all
``options``        values of options; ``limits``, their largest values
``streams``, ``progress``, ``tables``, ``exit_codes``  output
``distributions``  version and installation of distributions; ``end_with``, to end with a parent

The distribution `cpattn-proof` includes it. It knows other packages only by their names in
``subcommands``, and imports the installed ones when the command starts.
"""
