# SPDX-License-Identifier: Apache-2.0
"""Builds wheels into dist/, checks and tries them: `python scripts/build_wheels.py`.

For x86-64 one for each CPython from 3.10 to 3.13 that this machine has, and one for aarch64; then
one for musl on each of the two, with a CPython that scripts/musl_python.sh compiles. Those for
aarch64 run under qemu-user. The compiler is clang as the package ziglang has it, for the oldest
glibc that it knows of the two; one wheel has the kernels of all instruction sets. auditwheel names
and checks each, then it is installed into an empty environment and tried: by scripts/try_wheel.py,
and, where nothing is emulated, by the tests that need NumPy alone and are quick.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from requirements import extra, pyproject

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests_py"))

from audit import machine  # noqa: E402

CONFIG = pyproject("cpattn")
BUILD_PACKAGES = CONFIG["build-system"]["requires"]
WORK = ROOT / "build" / "wheels"
TOOLS = WORK / "tools"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
GLIBC = "2.17"
MUSL = "1.2"
#: That of Debian 13, whose sources scripts/musl_python.sh compiles.
MUSL_PYTHON = "3.13"
#: What a wheel must have, wherever it is built.
INSTRUCTION_SETS = {
    "x86_64": ("portable", "avx2", "avx512", "avx512bf16", "amx"),
    "aarch64": ("portable", "neon", "neonbf16"),
}
#: What pip takes for each C library.
PLATFORMS = {
    "gnu": ("manylinux_2_28", "manylinux_2_17", "manylinux2014"),
    "musl": ("musllinux_1_2",),
}
#: Some seconds of tests, of all that needs no kernels: those try_wheel.py compares with the oracle.
QUICK_TESTS = (
    "context_parallel/test_context_parallel_gates.py",
    "robustness/test_num_threads.py",
    "sparse/test_dsa_metadata.py",
    "transfer/test_plan_kv_transfer.py",
    "transfer/test_transfer_copies.py",
    "transfer/test_transfer_engine.py",
    "transfer/test_transfer_types.py",
)
#: ml_dtypes, which these need, has no wheels for musl.
BFLOAT16_TESTS = (
    "robustness/test_huge_caches.py",
    "transfer/sglang_0_5_23/test_kv_pages.py",
    "transfer/test_kv_layout.py",
)


def say(text: str) -> None:
    print(f"=== {text} ({time.monotonic() - STARTED:.0f} s so far)", flush=True)


STARTED = time.monotonic()


def run(*command: str | Path, **variables: str) -> None:
    """With the tools first on the path, and nothing of the sources to import."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = f"{TOOLS / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**inherited, "PATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{shlex.join(map(str, command))} ended with {done.returncode}")
    said = [line for line in done.stdout.splitlines() if line and not line.startswith("WARNING")]
    if said:
        print("   ", said[-1], flush=True)


def environment(folder: Path, interpreter: str, *packages: str) -> Path:
    """The interpreter of an environment that has just these packages."""
    python = folder / "bin" / "python"
    if not python.exists():
        run(interpreter, "-m", "venv", folder)
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages)
    return python


def compiler(target: str) -> dict[str, str]:
    """Variables with which zig.cmake finds its program, and ccache knows what it is."""
    (zig,) = TOOLS.glob("lib/python3*/site-packages/ziglang/zig")
    return {
        "ZIG": str(zig),
        # zig compiles C++'s library once for each glibc; so it stays with the rest of the build.
        "ZIG_GLOBAL_CACHE_DIR": os.environ.get("ZIG_GLOBAL_CACHE_DIR", str(WORK / "zig")),
        "CCACHE_COMPILERTYPE": "clang",
        "CCACHE_COMPILERCHECK": f"string:{zig.parent.name} {subprocess.getoutput(f'{zig} version')}"
        f" {target}",
        "CCACHE_BASEDIR": str(ROOT),
        "CCACHE_NOHASHDIR": "1",
    }


def build(
    interpreter: str,
    architecture: str,
    libc: str,
    out: Path,
    further: dict[str, str],
    **variables: str,
) -> Path:
    """A wheel as the compiler makes it, before auditwheel.

    All interpreters share a folder, so that what does not include Python.h is compiled once: CMake
    starts afresh, and ninja compiles what has another command.
    """
    folder = ROOT / "build" / f"wheels-{architecture}-{libc}"
    (eigen,) = TOOLS.glob("lib/python3*/site-packages/cmeel.prefix/share/eigen3/cmake")
    defines = {
        "CMAKE_TOOLCHAIN_FILE": ROOT / "cmake" / "zig.cmake",
        "CPATTN_ZIG_TARGET": f"{architecture}-linux-{libc}" + f".{GLIBC}" * (libc == "gnu"),
        "CPATTN_ALL_ISAS": "ON",
        # They convert and call, and zig writes what debuggers want unless told not to.
        "CPATTN_BINDINGS_OPTIONS": "-O2;-g0",
        "Eigen3_DIR": eigen,
    }
    # The linker strips: strip of this machine may not know the other processor.
    settings = {"build-dir": folder, "cmake.args": "--fresh", "install.strip": "false"}
    settings |= {f"cmake.define.{name}": value for name, value in (defines | further).items()}
    shutil.rmtree(out, ignore_errors=True)
    run(
        *(interpreter, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps"),
        *(f"--config-settings={name}={value}" for name, value in settings.items()),
        *("-w", out, ROOT),
        **compiler(f"{architecture} {libc}"),
        **variables,
    )
    (wheel,) = out.glob("*.whl")
    # An inline function compiled for more than the baseline must not leave its object.
    objects = [
        str(file)
        for name in INSTRUCTION_SETS[architecture]
        for file in folder.glob(f"cpp/CMakeFiles/cpattn_isa_{name}.dir/**/*.o")
    ]
    check = ROOT / "cmake" / "CheckIsaSymbols.cmake"
    run("cmake", "-DNM=nm", f"-DOBJECTS={';'.join(objects)}", "-P", check)
    return wheel


def repair(wheel: Path, dist: Path, libc: str) -> Path:
    """The wheel under the name of the oldest glibc or musl that it runs with, in dist/.

    auditwheel finds that itself: it lets nobody name one for a processor other than its own.
    """
    project, tags, architecture = wheel.stem.partition("-linux_")
    assert tags, wheel
    family = {"gnu": "manylinux", "musl": "musllinux"}[libc]
    for old in dist.glob(f"{project}-{family}*_{architecture}.whl"):
        old.unlink()
    if libc == "musl":
        name_musl(wheel, architecture)
    run(TOOLS / "bin" / "python", "-m", "auditwheel", "repair", "--plat", "auto", "-w", dist, wheel)
    (repaired,) = dist.glob(f"{project}-{family}*_{architecture}.whl")
    oldest = {"gnu": GLIBC, "musl": MUSL}[libc]
    if f"{family}_{oldest.replace('.', '_')}_{architecture}" not in repaired.name:
        sys.exit(f"{repaired.name} needs a newer {libc} than {oldest}")
    return repaired


def name_musl(wheel: Path, architecture: str) -> None:
    """The C library has the name that auditwheel knows, of Alpine, in the place of zig's libc.so.

    musl is found by any name that begins so. auditwheel writes the sums of the files anew.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(wheel, folder, "zip")
        (module,) = Path(folder).glob("cpattn/_core*.so")
        run("patchelf", "--replace-needed", "libc.so", f"libc.musl-{architecture}.so.1", module)
        shutil.make_archive(str(wheel), "zip", folder)
    wheel.with_suffix(".whl.zip").replace(wheel)


def numpy_for(version: str) -> str:
    """The oldest that the metadata claims for the oldest Python, the newest for the others."""
    (claimed,) = (x for x in CONFIG["project"]["dependencies"] if x.startswith("numpy>="))
    return claimed.replace(">=", "==") if version == PYTHONS[0] else "numpy"


def test_tools(*names: str) -> list[str]:
    return [x for x in extra("test") if x.startswith(names)]


def try_wheel(wheel: Path, version: str, interpreter: str) -> None:
    """In an environment that is made anew: with NumPy, then with what the tests need."""
    folder = WORK / f"try-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    python = environment(folder, interpreter, str(wheel), numpy_for(version))
    wanted = [x for x in INSTRUCTION_SETS["x86_64"] if machine.has_instruction_set(x)]
    trial = ROOT / "scripts" / "try_wheel.py"
    run(python, trial, ",".join(wanted))
    if shutil.which("qemu-x86_64"):  # a processor of 2008: nothing above the baseline runs unasked
        run("qemu-x86_64", "-cpu", "Nehalem", python, trial, "portable")
    else:
        say("qemu-x86_64 is not here: not tried on a processor with the baseline alone")
    tools = test_tools("pytest>", "pytest-timeout>", "hypothesis>", "ml_dtypes>")
    environment(folder, interpreter, *tools, "tomli; python_version < '3.11'")
    tests = [ROOT / "tests_py" / name for name in (*QUICK_TESTS, *BFLOAT16_TESTS)]
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)


def build_x86_64(versions: list[str], dist: Path) -> None:
    for version in versions:
        interpreter = machine.interpreter(version)
        if interpreter is None:
            say(f"No CPython {version} with headers here: no wheel for it")
            continue
        say(f"x86-64, CPython {version}: building")
        python = environment(WORK / f"build-{version}", interpreter, *BUILD_PACKAGES)
        made = build(str(python), "x86_64", "gnu", WORK / "made" / version, {})
        wheel = repair(made, dist, "gnu")
        say(f"{wheel.name}, {wheel.stat().st_size / 2**20:.1f} MB: trying")
        try_wheel(wheel, version, interpreter)


def build_aarch64(dist: Path) -> None:
    """For the Python of Debian, which qemu-user runs with what Debian has for it."""
    root = WORK / "aarch64-root"
    say("aarch64: Python of Debian, unpacked")
    run(ROOT / "scripts" / "aarch64_python.sh", root)
    (python,) = (root / "usr" / "bin").glob("python3.[0-9]*[0-9]")
    build_foreign(python, root / "include", "aarch64", "gnu", dist)


def build_musl(architecture: str, dist: Path) -> None:
    """Build a wheel for a CPython with musl, which is compiled from sources once."""
    root, name = WORK / f"{architecture}-musl-root", f"python{MUSL_PYTHON}"
    say(f"{architecture}, musl: CPython {MUSL_PYTHON}, compiled")
    command: list[str | Path] = [ROOT / "scripts" / "musl_python.sh"]
    command += [MUSL_PYTHON, architecture, root]
    if architecture != platform.machine():
        command.append(WORK / "x86_64-musl-root" / "bin" / name)
    run(*command, **compiler(f"{architecture} musl"))
    build_foreign(root / "bin" / name, root / "include" / name, architecture, "musl", dist)


def build_foreign(python: Path, include: Path, architecture: str, libc: str, dist: Path) -> None:
    """Build a wheel for a CPython of another processor or C library with that of this machine."""
    version = python.name.removeprefix("python")
    what = f"{architecture} {libc}"
    interpreter = machine.interpreter(version)
    if interpreter is None:
        say(f"No CPython {version} here, which would build the wheel for {what}: none is made")
        return
    say(f"{what}, CPython {version}: building")
    builder = environment(WORK / f"build-{version}", interpreter, *BUILD_PACKAGES)
    suffix = f".cpython-{version.replace('.', '')}-{architecture}-linux-{libc}.so"
    made = build(
        str(builder),
        architecture,
        libc,
        WORK / "made" / what.replace(" ", "-"),
        {
            "Python_INCLUDE_DIR": str(include),
            # pybind11 would take the one of the interpreter that builds.
            "PYTHON_MODULE_EXTENSION": suffix,
            "PYTHON_MODULE_DEBUG_POSTFIX": "",
        },
        SETUPTOOLS_EXT_SUFFIX=suffix,
        _PYTHON_HOST_PLATFORM=f"linux-{architecture}",
    )
    wheel = repair(made, dist, libc)
    say(f"{wheel.name}, {wheel.stat().st_size / 2**20:.1f} MB: trying")
    try_foreign(wheel, python, version, architecture, libc)


def try_foreign(wheel: Path, python: Path, version: str, architecture: str, libc: str) -> None:
    """Try a wheel, its packages in a folder of their own, under qemu-user for another processor."""
    home = python.parents[1]
    emulator: tuple[str | Path, ...] = ()
    tests: list[Path] = []
    tools: list[str] = []
    wanted = [*INSTRUCTION_SETS[architecture]]
    if architecture == platform.machine():
        wanted = [x for x in wanted if machine.has_instruction_set(x)]
        tools = test_tools("pytest>", "pytest-timeout>", "hypothesis>")
        tests = [ROOT / "tests_py" / name for name in QUICK_TESTS]
    elif shutil.which("qemu-aarch64") is None:
        say("qemu-aarch64 is not here (apt-get install qemu-user): the wheel was not tried")
        return
    else:
        emulator = ("qemu-aarch64", "-cpu", "max", "-L", home.parent)
    packages = WORK / f"{architecture}-{libc}-site-packages"
    shutil.rmtree(packages, ignore_errors=True)
    builder = WORK / f"build-{version}" / "bin" / "python"
    run(
        *(builder, "-m", "pip", "install", "-q", "--disable-pip-version-check"),
        *("--only-binary", ":all:", "--python-version", version, "--target", packages),
        *(flag for name in PLATFORMS[libc] for flag in ("--platform", f"{name}_{architecture}")),
        wheel,
        "numpy",
        *tools,
    )
    variables = {"PYTHONHOME": str(home), "PYTHONPATH": str(packages)}
    run(*emulator, python, ROOT / "scripts" / "try_wheel.py", ",".join(wanted), **variables)
    if tests:
        run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, **variables)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", nargs="*", default=list(PYTHONS), choices=PYTHONS,
                        help="for x86-64; none for no such wheel")  # fmt: skip
    parser.add_argument("--no-aarch64", action="store_true", help="without the wheels for Arm")
    parser.add_argument("--no-musl", action="store_true", help="without the wheels for musl")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the wheels go")
    given = parser.parse_args()
    if platform.machine() != "x86_64" or sysconfig.get_platform() != "linux-x86_64":
        sys.exit("build_wheels.py runs on x86-64 Linux, where it can try what it builds")
    say("Tools")
    environment(TOOLS, sys.executable, *BUILD_PACKAGES, *extra("wheels"))
    given.dist.mkdir(parents=True, exist_ok=True)
    build_x86_64(given.python, given.dist)
    if not given.no_aarch64:
        build_aarch64(given.dist)
    for architecture in INSTRUCTION_SETS:
        if not given.no_musl and not (given.no_aarch64 and architecture == "aarch64"):
            build_musl(architecture, given.dist)
    say("cpattn-proof and cpattn-lab, for any system")
    command = (TOOLS / "bin" / "python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", given.dist)
    run(*command, *ROOT.glob("python/distributions/*"))
    say("Done")


if __name__ == "__main__":
    main()
