"""The mock upstream and the load generator: built from C, or their Python stand-ins without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent.parent
CACHE: Final = ROOT / ".make" / "bench"


@dataclass(frozen=True, slots=True)
class Tools:
    """Commands without their arguments."""

    mock: tuple[str, ...]
    load: tuple[str, ...]
    note: str  # what a reader of the figures must know about them


def find_tools(*, python: bool = False) -> Tools:
    """Build what is out of date under the cache folder. With `python`, or without a compiler: asyncio."""
    names = () if python else (os.environ.get("CC"), "cc", "gcc", "clang")
    compiler = next((name for name in names if name and shutil.which(name)), None)
    if compiler is None:
        module = (sys.executable, "-m")
        note = "mock and load generator in Python: they limit the rate, trust CPU figures only"
        return Tools((*module, "tests.bench.mock_py"), (*module, "tests.bench.load_py"), note)
    built = [_build(compiler, name) for name in ("mock", "load")]
    return Tools((str(built[0]),), (str(built[1]),), "mock and load generator in C")


def _build(compiler: str, name: str) -> Path:
    source, target = HERE / f"{name}.c", CACHE / name
    newest = max(source.stat().st_mtime, (HERE / "wire.h").stat().st_mtime)
    if target.exists() and target.stat().st_mtime >= newest:
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    fresh = CACHE / f"{name}.{os.getpid()}"  # renamed when whole: another run may be building too
    subprocess.run(
        [compiler, "-O2", "-std=gnu11", "-Wall", "-Wextra", "-o", str(fresh), str(source)], check=True
    )
    return fresh.replace(target)
