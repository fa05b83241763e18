"""The tools of `make check` look at every module: a tool that finds no files also finds no faults."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "compression", "routing", "inference")

pytestmark = pytest.mark.e2e


def modules() -> set[Path]:
    """Every Python file of the four packages."""
    return {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}


def output_of(*command: str, code: int | None = 0) -> str:
    """What a tool prints, run from the root of the project; any exit code when `code` is None."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_pyright_checks_every_module() -> None:
    summary = json.loads(output_of("pyright", "--outputjson", code=None))["summary"]
    scripts = list((ROOT / "scripts").glob("*.py"))
    assert summary["filesAnalyzed"] == len(modules()) + len(scripts) + len([ROOT / "src/ctxgate/__init__.py"])


def test_mypy_checks_every_module() -> None:
    report = output_of("mypy", code=None).splitlines()[-1]
    (count,) = re.findall(r"(\d+) source files", report)
    assert int(count) >= len(modules()) + 1  # namespace packages count as files too


def test_ruff_checks_every_module() -> None:
    shown = {Path(line) for line in output_of("ruff", "check", "--show-files").splitlines()}
    assert modules() <= shown


def test_the_import_contracts_name_modules_that_exist() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (pure,) = (contract for contract in contracts if contract["id"] == "pure")
    assert [name for name in pure["source_modules"] if find_spec(name) is None] == []
