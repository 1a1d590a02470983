# SPDX-License-Identifier: Apache-2.0
"""The command `cpattn` and what all its subcommands share: streams, progress, tables, exit codes.

``main``           the entry point, which says what is not installed
``commands``       the command; ``subcommands`` names the module and the package of each
``command_group``  how commands end, and the overview of all
``options``        values of options; ``limits``, the largest that are accepted
``streams``, ``progress``, ``tables``, ``rates``, ``exit_codes``  what is printed

The distribution `cpattn-proof` ships it. It knows no other package: subcommands are imported when
they are asked for.
"""
