"""Real vLLM CPU servers for tests: start, wait, read counters, stop.

The servers run in a virtual environment of their own (`$VLLM_VENV`, else `.venv-vllm`), with the tiny
random-weight model of `inference/assets/tiny`: token counts, cache hits and wire shapes are the real
engine's, the text means nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT: Final = Path(__file__).resolve().parents[2]
MODEL: Final = ROOT / "inference/assets/tiny"
START: Final = {"PYTHONPATH": str(Path(__file__).resolve().parent / "engine_start")}
"""Environment of every engine: workers that wait without keeping others off their core."""
SERVED_NAME: Final = "tiny"
BLOCK_SIZE: Final = 32  # CPU attention wants multiples of 32
READY_S: Final = 300.0
STOP_S: Final = 20.0
POLL_S: Final = 0.25

FLAGS: Final = (
    *("--model", str(MODEL), "--served-model-name", SERVED_NAME, "--host", "127.0.0.1"),
    *("--load-format", "dummy", "--dtype", "bfloat16", "--block-size", str(BLOCK_SIZE), "--enforce-eager"),
    *("--enable-prompt-tokens-details", "--enable-per-request-metrics", "--enable-scale-out"),
    *("--enable-request-id-headers", "--enable-server-load-tracking"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)
# Prefill of one core is quadratic: a whole window of this size takes about a minute.
WINDOW: Final = ("--max-model-len", "131072")


@dataclass(frozen=True, slots=True)
class Counters:
    """An engine's own token totals since its start."""

    prompt: int
    cached: int
    generation: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.prompt - earlier.prompt, self.cached - earlier.cached, self.generation - earlier.generation
        )

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            self.prompt + other.prompt, self.cached + other.cached, self.generation + other.generation
        )


@dataclass(frozen=True, slots=True)
class Engine:
    """A running server. `url` is its root, without a path and without a trailing slash.

    `group`: the process group of the server and its workers, 0 where nobody asks.
    """

    name: str
    url: str
    log: Path
    group: int = 0

    def metric(self, name: str) -> float:
        """The sum over all label sets of the sample called exactly `name`; KeyError where absent."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return sample(answer.read().decode(), name)

    def counters(self) -> Counters:
        """The token counters, read in one scrape."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return Counters(
            prompt=int(sample(text, "vllm:prompt_tokens_total")),
            cached=int(sample(text, "vllm:prompt_tokens_cached_total")),
            generation=int(sample(text, "vllm:generation_tokens_total")),
        )


def sample(text: str, name: str) -> float:
    """The sum of the samples of an exposition whose name is exactly `name`; KeyError where absent."""
    rows = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    if not rows:
        raise KeyError(name)
    return sum(float(line.rsplit(" ", 1)[1]) for line in rows)


@dataclass(frozen=True, slots=True)
class Spec:
    """How to start one engine: its name, extra flags (the last of two wins), its core by index.

    `port`: 0 for one that is free.
    """

    name: str
    flags: Sequence[str] = WINDOW
    core: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0


class EngineError(RuntimeError):
    """An engine ended or stayed silent while starting; the message holds the end of its log."""


def interpreter() -> Path | None:
    """The Python of the environment that holds vLLM, or None where there is none."""
    path = Path(os.environ.get("VLLM_VENV") or ROOT / ".venv-vllm") / "bin/python"
    return path if path.exists() else None


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(python: Path, folder: Path, *specs: Spec) -> Iterator[tuple[Engine, ...]]:
    """Start the engines in parallel, wait until each answers /health, stop them at the end.

    Logs go to `folder/NAME.log`. Raises EngineError when one of them does not come up.
    """
    with ExitStack() as stack:
        started = [stack.enter_context(_process(python, folder, spec)) for spec in specs]
        deadline = time.monotonic() + READY_S
        for engine, process in started:
            _await_health(engine, process, deadline)
        yield tuple(engine for engine, _ in started)


@contextmanager
def _process(python: Path, folder: Path, spec: Spec) -> Iterator[tuple[Engine, subprocess.Popen[bytes]]]:
    port, log_file = spec.port or free_port(), folder / f"{spec.name}.log"
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *FLAGS, "--port", str(port)]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, *spec.flags],
            cwd=folder,
            env=os.environ | _environment(spec.core) | spec.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its workers share the group, so that stopping reaches them all
        )
    try:
        yield Engine(spec.name, f"http://127.0.0.1:{port}", log_file, process.pid), process
    finally:
        _stop(process)


def _environment(core: int) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))
    return START | {
        "VLLM_CPU_OMP_THREADS_BIND": str(cores[core % len(cores)]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def _await_health(engine: Engine, process: subprocess.Popen[bytes], deadline: float) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineError(f"{engine.name} ended with {process.returncode}\n{_tail(engine.log)}")
        try:
            with urllib.request.urlopen(f"{engine.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass  # not listening yet
        time.sleep(POLL_S)
    raise EngineError(f"{engine.name} was not ready within {READY_S:.0f} s\n{_tail(engine.log)}")


def _tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ProcessLookupError):  # the whole group is gone
        os.killpg(process.pid, signal.SIGKILL)  # a worker that outlived its server
