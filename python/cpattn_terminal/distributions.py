# SPDX-License-Identifier: Apache-2.0
"""Version and folders of the distributions with subcommands, which no index has yet."""

#: The version of all three distributions.
VERSION = "0.1.0"

_FOLDERS = {
    "cpattn": ".",
    "cpattn-lab": "./python/distributions/cpattn-lab",
    "cpattn-proof": "./python/distributions/cpattn-proof",
}


def how_to_install(distribution: str) -> str:
    """Return the command that installs a distribution, and the folder to run it in."""
    return f"pip install {_FOLDERS[distribution]} in the folder of cpattn's sources"
