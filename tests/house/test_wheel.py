"""The wheel is complete: built from the source archive, installed where nothing else is, imported whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "compression", "routing", "inference")
NO_NETWORK = re.compile(r"NewConnectionError|NameResolutionError|ConnectTimeoutError|Network is unreachable")

IMPORT_EVERYTHING = """
import importlib, pathlib, sys
import ctxgate
root = pathlib.Path(ctxgate.__file__).parent
assert root.is_relative_to(sys.prefix), root
for path in sorted(root.rglob("*.py")):
    parts = ("ctxgate", *path.relative_to(root).with_suffix("").parts)
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    importlib.import_module(name)
    print(name)
"""

pytestmark = pytest.mark.e2e


def clean_environment() -> dict[str, str]:
    """The caller's environment without what would let this checkout leak into another interpreter."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def tracked_modules() -> set[str]:
    """The dotted name of every Python file in the four packages of this checkout."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {"ctxgate." + ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as `python -m build` makes it: the source archive first, the wheel from that."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        env=clean_environment(),
    )
    (built,) = out.glob("*.whl")
    assert len(list(out.glob("*.tar.gz"))) == 1
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel and its core dependencies alone."""
    environment = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = environment / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "pip", "install", "-qq", str(wheel)],
        check=False,
        capture_output=True,
        text=True,
        env=clean_environment(),
    )
    if done.returncode and os.environ.get("CI") != "true" and NO_NETWORK.search(done.stderr):
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    return python


def test_the_wheel_holds_what_the_checkout_holds(wheel: Path) -> None:
    expected = {
        f"ctxgate/{path.relative_to(ROOT).as_posix()}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected | {"ctxgate/__init__.py", "ctxgate/py.typed"}


def test_the_twin_finds_its_tokenizer_in_the_wheel(wheel: Path) -> None:
    packed = zipfile.ZipFile(wheel).namelist()
    assert "ctxgate/inference/assets/tiny/tokenizer.json" in packed
    assert "ctxgate/inference/assets/tiny/tokenizer_config.json" in packed


def test_every_module_imports_with_the_core_dependencies_alone(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed, "-c", IMPORT_EVERYTHING],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == tracked_modules() | {"ctxgate"}


def test_the_installed_command_knows_its_version(installed: Path, wheel: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed.parent / "ctxgate", "--version"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_environment(),
    )
    assert done.stdout.strip() == wheel.name.split("-")[1]
