# SPDX-License-Identifier: Apache-2.0
"""Makes a folder that the library `kernels` of Hugging Face loads, with flash-attn's functions.

    python scripts/build_hub_kernel.py --out DIR [WHEEL ...]

The package lies in it as it is, under a name of its own, with an extension for each CPython. Wheels
of one version and processor, as `make wheel` builds them, run on any Linux with glibc 2.17; without
them the extension that this checkout has built is taken, for this machine. No part of torch is
linked, so the variant is one for torch's stable ABI: a single folder serves all releases. The same
sources make the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "cpattn-flash-attn"
#: The oldest torch that cpattn runs with, and the oldest `kernels` that loaded such a folder here.
TORCH, KERNELS = "26", "0.17.2"
#: In the kernel's folder; installed as `cpattn` it may be there beside this copy.
PACKAGE = "_cpattn"
INIT = """\
# SPDX-License-Identifier: Apache-2.0
\"\"\"The functions of flash-attn 2.8 on CPU tensors, by cpattn.\"\"\"

from .{package} import __version__
from .{package}.integrations.flash_attn._operators import define_operators
from .{package}.integrations._torch_threads import use_torch_threads

use_torch_threads()
flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache = define_operators("{id}")

__all__ = ["__version__", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
"""
Files = dict[str, bytes]


def files_of_checkout() -> Files:
    """The package's sources, and the extension that was built of them."""
    sources = ROOT / "python" / "cpattn"
    extensions = (ROOT / "build" / "release" / "python" / "cpattn").glob("_core.*.so")
    paths = {path.relative_to(sources): path for path in sources.rglob("*.py")}
    paths |= {Path(path.name): path for path in extensions}
    return {str(name): path.read_bytes() for name, path in paths.items()}


def files_of_wheels(wheels: list[Path]) -> Files:
    """The package of all wheels, whose Python is the same."""
    files: Files = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for path in archive.namelist():
                top, _, name = path.partition("/")
                if top != "cpattn" or not name.endswith((".py", ".so")):
                    continue
                content = archive.read(path)
                if files.setdefault(name, content) != content:
                    sys.exit(f"build_hub_kernel.py: {wheel.name} has another {name} than the rest")
    return files


def processor(files: Files) -> str:
    """The one of all extensions, by their names."""
    found = [re.fullmatch(r"_core\.cpython-\d+-(\w+)-linux-gnu\.so", name) for name in files]
    names = {match[1] for match in found if match}
    if len(names) != 1:
        sys.exit(f"build_hub_kernel.py: extensions must be for one processor, got {sorted(names)}")
    return names.pop()


def write(files: Files, out: Path) -> Path:
    """The variant's folder, anew, in `out`, which may have those of other processors."""
    variant = out / "build" / f"torch-stable-abi{TORCH}-cpu-{processor(files)}-linux"
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    kernel_id = f"{NAME.replace('-', '_')}_cpu_{digest.hexdigest()[:12]}"
    metadata = {
        "id": kernel_id,
        "name": NAME,
        "version": 1,
        "license": "Apache-2.0",
        "kernels-minver": KERNELS,
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    shutil.rmtree(variant, ignore_errors=True)
    added = {
        "__init__.py": INIT.format(package=PACKAGE, id=kernel_id).encode(),
        "metadata.json": f"{json.dumps(metadata, indent=2)}\n".encode(),
        "LICENSE": (ROOT / "LICENSE").read_bytes(),
    }
    for name, content in {**{f"{PACKAGE}/{x}": files[x] for x in files}, **added}.items():
        path = variant / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return variant


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder of the kernel")
    parser.add_argument("wheels", type=Path, nargs="*", metavar="WHEEL", help="of cpattn")
    given = parser.parse_args()
    files = files_of_wheels(given.wheels) if given.wheels else files_of_checkout()
    variant = write(files, given.out)
    pythons = sorted(name.split("-")[1] for name in files if name.startswith("_core."))
    size = sum(path.stat().st_size for path in variant.rglob("*") if path.is_file())
    print(f"{variant}: {len(files) + 3} files, {size / 2**20:.1f} MB, CPython {', '.join(pythons)}")
    if not given.wheels:
        print("Its kernels are those of the build in this checkout, for this machine's glibc.")


if __name__ == "__main__":
    main()
