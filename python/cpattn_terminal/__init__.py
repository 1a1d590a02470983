# SPDX-License-Identifier: Apache-2.0
"""The command `cpattn` and what all its subcommands share: streams, progress, tables, exit codes.

``main``           the entry point, which says what is not installed
``commands``       the command; ``subcommands`` names the module and the package of each
``command_group``  how commands end, and the overview of all
``options``        values of options; ``limits``, the largest that are accepted
``streams``, ``progress``, ``tables``, ``exit_codes``  what is printed

``distributions``  their version, and how to install them; ``end_with``, to end with a parent

The distribution `cpattn-proof` ships it. It knows other packages by the names in ``subcommands``
alone, and imports the subcommands of those that are installed when the command starts.
"""
