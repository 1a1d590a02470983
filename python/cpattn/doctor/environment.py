# SPDX-License-Identifier: Apache-2.0
"""Python and the packages installed beside cpattn, from their metadata."""

from __future__ import annotations

import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import metadata

from .. import _core, torch_guard
from ..integrations import _support
from ..integrations._support import first_installed
from .finding import Finding, State

_SECTION = "environment"
_GROUPS = {"sglang": "sglang.srt.plugins", "vLLM on CPU": "vllm.general_plugins"}
# Packages that commands and functions need beyond NumPy, by extra.
_EXTRAS = {
    "torch": (("torch",), "cpattn.distributed, operators of torch"),
    "profile": (("rich", "matplotlib"), "tables and plots of cpattn.profile"),
    "notebook": (("ipykernel", "nbclient"), "the notebooks"),
    "mooncake": (("mooncake-transfer-engine-non-cuda",), "KV transfer, replay --disaggregate"),
}
_INSTALL = "pip install '.[{}]'"  # in the source folder, as PyPI does not have it
# Finds the name and version bounds in a requirement, before its conditions.
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*\(?([^;)]*)")
_BOUND = re.compile(r"(<=|<|==)\s*([\w.]+)")
_NO_AMX = re.compile(r"(?!.*AMX)(SSE41|AVX|AVX2|AVX2_VNNI|AVX512_\w+)$", re.IGNORECASE)


def findings(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Report all findings of this module."""
    yield _python()
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    yield Finding(_SECTION, "cpattn", f"{_core.__version__}, from {folder}")
    yield _release("NumPy")
    yield from _torch(environ)
    for entry in _support.ENGINES:
        if entry.name != "torch":
            yield _release(entry.name)
    for engine, group in _GROUPS.items():
        yield _plugin(engine, group, environ)
    yield Finding(_SECTION, "compiler", "not needed: nothing is built when cpattn runs")
    for extra in _EXTRAS:
        yield _extra(extra)


def _python() -> Finding:
    version = platform.python_version()
    kind = platform.python_implementation()
    kind += " with musl" * str(sysconfig.get_config_var("SOABI")).endswith("-musl")
    kind += " without the GIL" * bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    if kind in (entry.name for entry in _support.BASIS):
        text, state = _judged(_support.find(kind), version)
    else:
        text, state = f"{version}: {kind} was not tried", "warning"
    return Finding(_SECTION, "Python", f"{text}, {sys.executable}", state)


def _release(name: str) -> Finding:
    """Return the line of an engine or library: whether cpattn was tried with its release."""
    entry = _support.find(name)
    found = first_installed(entry.distributions)
    if found is None:
        return Finding(_SECTION, name, "not installed")
    distribution, version = found
    text, state = _judged(entry, version)
    if distribution.lower() != name.lower():
        text = f"{distribution} {text}"
    return Finding(_SECTION, name, text, state)


def _judged(entry: _support.Support, version: str) -> tuple[str, State]:
    verdict = entry.verdict(version)
    if verdict == "tried":
        return f"{version}, as tried", "ok"
    tried = " and ".join(entry.tried) + (" were" if len(entry.tried) > 1 else " was")
    asking = _asks_for_another(entry)
    if verdict == "not tried" and asking:
        return f"{version}: {verdict}, {tried}, which {asking} does not allow", "note"
    return f"{version}: {verdict}, {tried}; {entry.otherwise}", "warning"


def _asks_for_another(entry: _support.Support) -> str:
    """Return the installed engine that rejects every tried release of a library, if any."""
    for engine in _support.ENGINES:
        found = first_installed(engine.distributions)
        if found is None:
            continue
        for line in metadata.requires(found[0]) or []:
            match = _REQUIREMENT.match(line)
            if not match or match[1].lower() not in entry.distributions or "extra ==" in line:
                continue
            if not any(_allows(match[2], release) for release in entry.tried):
                return f"{found[0]} {found[1]}"
    return ""


def _allows(specifiers: str, release: str) -> bool:
    """Tell whether upper bounds and exact releases of a requirement allow a release."""
    found = _support.numbers(release)
    for operator, bound in _BOUND.findall(specifiers):
        limit = _support.numbers(bound)
        if operator == "<" and found >= limit:
            return False
        if operator == "<=" and found > limit:
            return False
        if operator == "==" and found[: len(limit)] != limit:
            return False
    return True


def _torch(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report torch, and whether its bfloat16 products are legal here."""
    release = _release("torch")
    yield release
    if release.text == "not installed":
        return
    variable = torch_guard.VARIABLE
    limit = torch_guard.onednn_limit(
        amx_usable=_core.amx_usable(),
        palette_missing=_core.amx_palette_missing(),
        has_avx512_fp16=_core.has_avx512_fp16(),
    )
    given = environ.get(variable)
    if limit is None:
        text = "not needed on this machine"
        text += f"; {variable}={given} is set all the same" if given else ""
        yield Finding(_SECTION, "torch guard", text)
    elif given and _NO_AMX.match(given):
        text = f"{variable}={given}: torch's bfloat16 products do without AMX"
        yield Finding(_SECTION, "torch guard", text)
    else:
        why = f"{variable}={given} allows AMX" if given else f"{variable} is not set"
        text = f"torch's bfloat16 products would die with SIGILL: {why}"
        hint = f"export {variable}={limit}, or cpattn.torch_guard.prepare() before import torch"
        yield Finding(_SECTION, "torch guard", text, "broken", hint)


def _plugin(engine: str, group: str, environ: Mapping[str, str]) -> Finding:
    """Report whether a starting engine will find the plug-in and turn it on."""
    short = engine.partition(" ")[0]
    name = f"{short} plug-in"
    points = metadata.entry_points(group=group)
    others = sorted({point.name for point in points} - {"cpattn"})
    beside = f", beside {', '.join(others)}" if others else ""
    there = first_installed(_support.find(engine).distributions)
    if not any(point.value.startswith("cpattn.") for point in points):
        state: State = "warning" if there else "note"
        hint = "pip install ." if there else ""
        text = f"not found: cpattn is not installed, only on the path{beside}"
        return Finding(_SECTION, name, text, state, hint)
    if environ.get("CPATTN_PLUGINS") == "0":
        return Finding(_SECTION, name, f"found, off by CPATTN_PLUGINS=0{beside}", "note")
    variable = f"{short.upper()}_PLUGINS"
    allowed = environ.get(variable)
    if allowed is not None and "cpattn" not in [part.strip() for part in allowed.split(",")]:
        return Finding(_SECTION, name, f"found, left out by {variable}={allowed}{beside}", "note")
    if there and not _support.find(engine).is_taken_over(there[1], environ):
        text = f"found, and not active in {there[1]}, with which it was not tried{beside}"
        return Finding(_SECTION, name, text, "note")
    parts = environ.get("CPATTN_SGLANG_PARTS") if short == "sglang" else None
    active = f"active, its parts {parts}" if parts else "active"
    if not there:
        return Finding(_SECTION, name, f"found{beside}; there is no {short} to load it")
    return Finding(_SECTION, name, f"found, {active} in every {short} that starts{beside}")


def _extra(extra: str) -> Finding:
    distributions, purpose = _EXTRAS[extra]
    missing = [name for name in distributions if first_installed([name]) is None]
    if not missing:
        return Finding(_SECTION, f"extra {extra}", f"complete, for {purpose}")
    text = f"without {', '.join(missing)}, which {purpose} need"
    return Finding(_SECTION, f"extra {extra}", text, "note", _INSTALL.format(extra))
