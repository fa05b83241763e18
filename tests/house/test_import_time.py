"""Starting the command stays cheap: what is heavy is imported by the code that needs it.

Asserted on the modules that were loaded, not on seconds.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

HEAVY = {
    "torch",
    "faiss",
    "litellm",
    "sentence_transformers",
    "openai",
    "transformers",
    "tokenizers",
    "jinja2",
    "rich",
    "vllm",
}
SERVING = {"fastapi", "starlette", "uvicorn", "aiohttp"}

MODULES = """
import sys
print(*sorted({name.partition('.')[0] for name in sys.modules}), sep=',', file=sys.stderr)
"""


def loaded_by(code: str) -> set[str]:
    """The top-level modules in memory after `code` ran in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", f"import atexit\natexit.register(lambda: exec({MODULES!r}))\n{code}"],
        check=True,
        capture_output=True,
        text=True,
    )
    return set(done.stderr.strip().splitlines()[-1].split(","))


def test_the_probe_sees_a_heavy_import() -> None:
    assert "jinja2" in loaded_by("import jinja2")


def test_importing_the_command_loads_nothing_heavy() -> None:
    loaded = loaded_by("import ctxgate.gateway.cli")
    assert "ctxgate" in loaded
    assert loaded & (HEAVY | SERVING) == set()


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_load_no_server(option: str) -> None:
    code = f"""
import ctxgate.gateway.cli
try:
    ctxgate.gateway.cli.main([{option!r}])
except SystemExit as end:
    assert end.code == 0
"""
    assert loaded_by(code) & (HEAVY | SERVING) == set()


def test_building_the_gateway_loads_nothing_heavy() -> None:
    loaded = loaded_by("import ctxgate.gateway.app")
    assert "fastapi" in loaded
    assert loaded & HEAVY == set()
