"""Several real vLLM replicas and recorded sessions: engine hits and times to first texts, by way of routing.

usage: python -m tests.bench.replicas [--replicas 4] [--sessions 12] [--turns 8] [--routers]

Half of the replicas are a fast pool of few sequences, half a standard one of many, each on one thread. All
ways of routing get the same requests, one after the other, from empty caches on. `--routers` adds
vllm-router, installed under .make/peers on first use. Times on a busy machine tell little: compare rows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.bench.systems import free_port
from tests.bench.tools import ROOT

sys.path.insert(0, str(ROOT / "tests"))  # as pytest does

from e2e import engine as engines
from e2e.replica_runs import POLICIES, Run, Target, compared, recorded, replicas, run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROUTER_VERSION: Final = "0.1.17"
ROUTER_HOME: Final = ROOT / ".make" / "peers" / "vllm-router"
ROUTER_POLICIES: Final = ("cache_aware", "consistent_hash")
READY_S: Final = 60.0


def installed() -> Path:
    """The interpreter of the environment that holds vllm-router, made on first use."""
    python = ROUTER_HOME / "bin" / "python"
    stamp = ROUTER_HOME / "installed"
    if not stamp.exists() or stamp.read_text() != ROUTER_VERSION:
        subprocess.run([sys.executable, "-m", "venv", str(ROUTER_HOME)], check=True)
        wanted = f"vllm-router=={ROUTER_VERSION}"
        subprocess.run([str(python), "-m", "pip", "install", "-qq", wanted], check=True)
        stamp.write_text(ROUTER_VERSION)
    return python


@contextmanager
def router(python: Path, folder: Path, policy: str, urls: Sequence[str]) -> Iterator[Target]:
    """A running vllm-router in front of the engines, with its own defaults."""
    port, metrics = free_port(), free_port()
    command = [str(python), "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", policy, "--prometheus-port", str(metrics), "--worker-urls", *urls]
    log = folder / f"router-{policy}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        _await(f"http://127.0.0.1:{port}/health", process, log)
        yield Target(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass  # not listening yet
        time.sleep(0.1)
    raise RuntimeError(f"vllm-router does not come up:\n{log.read_text(errors='replace')[-2000:]}")


def table(runs: Sequence[Run]) -> str:
    """A row per way of routing; times in milliseconds."""
    lines = [
        "| routing | requests | failed | prompt tokens | hit tokens | hit rate | TTFT p50 | p90 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in runs:
        times = sorted(one.ttfts)
        p50, p90 = (1000 * times[min(len(times) * q // 100, len(times) - 1)] for q in (50, 90))
        cells = (one.name, len(times) + one.failed, one.failed, one.prompt, one.hits)
        rate = f"{one.hits / max(one.prompt, 1):.4f}"
        lines.append(f"| {' | '.join(map(str, cells))} | {rate} | {p50:.0f} | {p90:.0f} |")
    return "\n".join(lines)


def main() -> int:
    """Run the comparison and print its table; 2 where something that it needs is missing."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.replicas")
    parser.add_argument("--replicas", type=int, default=4, help="engines; half of them fast")
    parser.add_argument("--sessions", type=int, default=12, help="recorded sessions, eight at once")
    parser.add_argument("--turns", type=int, default=8, help="requests of a session at most")
    parser.add_argument("--policies", default=",".join(POLICIES), help="the gateway's, separated by commas")
    parser.add_argument("--routers", action="store_true", help="vllm-router as well")
    args = parser.parse_args()
    python, tasks = engines.interpreter(), recorded(args.sessions, args.turns)
    if python is None or not tasks:
        missing = "vLLM (`make vllm`)" if python is None else "the sessions in ../shared/trajectories"
        print(f"missing: {missing}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="ctxgate-replicas-") as name:
        folder = Path(name)
        with replicas(python, folder, args.replicas) as pools:
            runs = compared(folder, pools, tasks, args.policies.split(","))
            if args.routers:
                every = [one for each in pools.values() for one in each]
                interpreter = installed()
                for policy in ROUTER_POLICIES:
                    with router(interpreter, folder, policy, [one.url for one in every]) as target:
                        runs.append(run(f"vllm-router {policy}", target, every, tasks))
    print(f"{args.replicas} replicas, {len(tasks)} sessions, {sum(map(len, tasks))} requests each")
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
