"""Compiles ``fsref/objects/kernels.c``, as a part of every build and installation; ``python tools/build_kernels.py`` compiles it in place.

The result needs no Python headers and no particular Python: it is loaded with ctypes. Where it cannot be compiled (no C compiler, another
processor than x86-64), the build says so and goes on without it: fsref then decodes with numcodecs.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("fsref/objects/kernels.c")
LIBRARY = SOURCE.with_name("_kernels.so")
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-Wall", "-Wextra")


class KernelsHook(BuildHookInterface[Any]):
    """Puts the compiled library into the wheel, or beside its source for an editable installation."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = Path(self.root) / LIBRARY
        if not compile_kernels(Path(self.root) / SOURCE, library) or version == "editable":
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["force_include"][str(library)] = str(LIBRARY)


def compile_kernels(source: Path, library: Path, *, flags: tuple[str, ...] = ()) -> bool:
    """Compiles ``source`` to ``library``, which is replaced at once. False, with a line that says why, if it cannot."""
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if platform.machine() != "x86_64" or sys.platform != "linux" or compiler is None:
        why = "no C compiler" if compiler is None else f"{sys.platform} on {platform.machine()}"
        print(f"fsref: {source.name} is not compiled ({why}); chunks are decoded by numcodecs", file=sys.stderr)
        return False
    number = zlib.crc32(source.read_bytes())
    try:  # a folder that cannot be written to, or a compiler that makes nothing and says that all is well, is no reason to fail either
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            command = [*compiler.split(), *FLAGS, *flags, f"-DSOURCE={number}u", "-o", str(made), str(source)]
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
            made.replace(library)
    except (OSError, subprocess.CalledProcessError) as e:
        said = e.stderr if isinstance(e, subprocess.CalledProcessError) else ""
        print(f"fsref: {source.name} is not compiled, chunks are decoded by numcodecs: {e}\n{said}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    sys.exit(not compile_kernels(root / SOURCE, root / LIBRARY))
