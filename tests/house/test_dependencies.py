"""What the packages import is declared, and what is declared is imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "compression", "routing", "inference")
OTHER_NAMES = {
    "yaml": "pyyaml",
    "faiss": "faiss-cpu",
    "PIL": "pillow",
    "re2": "google-re2",
    "zmq": "pyzmq",
}  # modules that are not named as their distribution
BY_NAME = {"uvloop", "httptools"}  # uvicorn loads them when it is told their names


def imported() -> set[str]:
    """The distributions whose modules the four packages import, at the top or lazily; names in lower case."""
    modules: set[str] = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.partition(".")[0])
    foreign = modules - set(sys.stdlib_module_names) - {"ctxgate"}
    return {canonical(OTHER_NAMES.get(module, module)) for module in foreign}


def declared(requirements: list[str]) -> set[str]:
    """The names of a list of requirements."""
    return {canonical(re.split(r"[\[<>=!~; ]", requirement)[0]) for requirement in requirements}


def canonical(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_imports_and_declared_dependencies_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = declared(project["dependencies"])
    extras = project["optional-dependencies"]
    optional = set().union(
        *(
            declared(extras[name])
            for name in ("twin", "tokenizers", "redis", "events", "dense", "pictures", "providers")
        )
    )
    assert imported() - core <= optional
    assert core - imported() <= BY_NAME
