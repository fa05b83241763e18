"""The bench with the other gateways of the field beside ctxgate, each installed in a place of its own.

usage: python -m tests.bench.peers [--peers a,b] [options of tests.bench.bench]

A peer is installed on first use under .make/peers at a fixed version and runs with one worker and the
settings its own documentation recommends for production. One that cannot be installed or does not
answer is listed in the result with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.bench.bench import OWN, add_arguments, finish, make_plan, run_plan
from tests.bench.bodies import MODEL
from tests.bench.rows import ALL_ROWS, BAR_ROWS
from tests.bench.systems import Launch, Place, Spec, StartError, free_port
from tests.bench.tools import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HOME: Final = ROOT / ".make" / "peers"
MAX_BODY: Final = 512 * 2**20
INSTALL_TIMEOUT_S: Final = 1200.0


class InstallError(Exception):
    """Why a peer could not be installed."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A gateway to compare with: how to install it into a folder, and how to start it from there."""

    name: str
    version: str
    install: Callable[[Path], None]
    prepare: Callable[[Path, Place], Launch]


def ensure(peer: Peer) -> Spec:
    """Install the peer unless its stamp says that this version is there. Raises InstallError."""
    home = HOME / peer.name
    stamp = home / "installed"
    if not stamp.exists() or stamp.read_text() != peer.version:
        print(f"installing {peer.name} {peer.version}", file=sys.stderr, flush=True)
        home.mkdir(parents=True, exist_ok=True)
        peer.install(home)
        stamp.write_text(peer.version)
    return Spec(peer.name, partial(peer.prepare, home))


# ---- installing ---------------------------------------------------------------------------------


def run(command: Sequence[str | Path], folder: Path) -> None:
    """Raises InstallError with the end of what the command wrote."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(str(error)) from error
    if done.returncode:
        lines = [line for line in done.stdout.decode(errors="replace").splitlines() if "WARNING" not in line]
        raise InstallError(f"{Path(command[0]).name} failed: " + " / ".join(lines[-4:])[-600:])


def pip_install(*requirements: str) -> Callable[[Path], None]:
    """Into a virtual environment of its own."""

    def install(home: Path) -> None:
        python = home / "bin" / "python"
        if not python.exists():
            run((sys.executable, "-m", "venv", home), home)
        run((python, "-m", "pip", "install", "-q", *requirements), home)

    return install


def install_litellm(home: Path) -> None:
    """The extra `proxy` pins sub-packages that are not published everywhere; the proxy runs without them."""
    pip_install(f"litellm=={LITELLM}", "packaging")(home)
    listing = (
        "import importlib.metadata as m; from packaging.requirements import Requirement as R\n"
        "for r in map(R, m.requires('litellm')):\n"
        "    if r.marker and not r.marker.evaluate({'extra': ''}) and r.marker.evaluate({'extra': 'proxy'})"
        " and not r.name.startswith('litellm-'): r.marker = None; print(r)\n"
    )
    done = subprocess.run(
        [home / "bin" / "python", "-c", listing], stdout=subprocess.PIPE, check=True, text=True
    )
    pip_install(*done.stdout.split("\n")[:-1])(home)


def install_portkey(home: Path) -> None:
    """Newer versions of its server adapter answer 500 to every stream on Node 20."""
    if not shutil.which("npm"):
        raise InstallError("needs npm")
    package = {"dependencies": {PORTKEY_PACKAGE: PORTKEY}, "overrides": {"@hono/node-server": "1.13.8"}}
    (home / "package.json").write_text(json.dumps(package))
    run(("npm", "install", "--no-audit", "--no-fund"), home)


def install_nginx(home: Path) -> None:
    if nginx():
        return
    if os.geteuid() or not shutil.which("apt-get"):
        raise InstallError("needs nginx on the machine, or root and apt-get")
    run(("apt-get", "update", "-qq"), home)
    run(("apt-get", "install", "-y", "-qq", "--no-install-recommends", "nginx-light"), home)


def nginx() -> str | None:
    return shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


# ---- starting -----------------------------------------------------------------------------------


def prepare_nginx(_home: Path, place: Place) -> Launch:
    """A plain reverse proxy: the floor in C."""
    upstream = place.upstream.removeprefix("http://")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temp = "".join(f"  {kind}_temp_path {place.folder}/{kind};\n" for kind in kinds)
    config = f"""\
worker_processes 1;
daemon off;
pid {place.folder}/pid;
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
{temp}  access_log off;
  client_max_body_size 512m;
  keepalive_requests 1000000;
  upstream engine {{ server {upstream}; keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{place.port};
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_request_buffering off;
    }}
  }}
}}
"""
    (place.folder / "nginx.conf").write_text(config)
    binary = nginx() or "nginx"
    return Launch((binary, "-p", str(place.folder), "-e", "stderr", "-c", str(place.folder / "nginx.conf")))


def prepare_litellm(home: Path, place: Place) -> Launch:
    """One worker, no database, logging off, as its page on production asks."""
    secret = "sk-bench-" + "0123456789abcdef" * 2
    parameters = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{place.upstream}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": parameters}],
        "litellm_settings": {"request_timeout": 600, "set_verbose": False, "num_retries": 0},
        "general_settings": {"master_key": secret},
    }
    path = place.folder / "config.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    command = (str(home / "bin" / "litellm"), "--config", str(path), "--host", "127.0.0.1")
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION"}
    return Launch(
        (*command, "--port", str(place.port), "--num_workers", "1"),
        (f"authorization: Bearer {secret}",),
        env | {"PATH": _path(home)},
        start_timeout_s=120,
        reshapes=True,
    )


def prepare_router(program: tuple[str, ...], home: Path, place: Place) -> Launch:
    """The Rust routers share their options."""
    command = [str(home / "bin" / program[0]), *program[1:]]
    command += ["--worker-urls", place.upstream, "--host", "127.0.0.1", "--port", str(place.port)]
    command += ["--policy", "round_robin", "--max-payload-size", str(MAX_BODY)]
    command += ["--prometheus-port", str(free_port())]
    return Launch(tuple(command), env={"RUST_LOG": "error", "PATH": _path(home)}, start_timeout_s=60)


def prepare_ferro(home: Path, place: Place) -> Launch:
    config = place.folder / "ferro.yaml"
    targets = "targets: [{virtual_key: openai}]\n"
    config.write_text(f"strategy: {{mode: fallback}}\naliases: {{{MODEL}: gpt-4o}}\n{targets}")
    env = {
        "GATEWAY_CONFIG": str(config),
        "PORT": str(place.port),
        "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": f"{place.upstream}/v1",
        "MASTER_KEY": FERRO_KEY,
        "LOG_LEVEL": "error",
        "RATE_LIMIT_RPS": "1000000",
        "RATE_LIMIT_BURST": "1000000",
    }
    return Launch((str(home / "bin" / "ferrogw"), "serve"), (f"authorization: Bearer {FERRO_KEY}",), env)


def prepare_portkey(home: Path, place: Place) -> Launch:
    script = home / "node_modules" / PORTKEY_PACKAGE / "build" / "start-server.js"
    provider = ("x-portkey-provider: openai", f"x-portkey-custom-host: {place.upstream}/v1")
    env = {"NODE_ENV": "production", "PORT": str(place.port)}
    return Launch(("node", str(script), f"--port={place.port}", "--headless"), (*provider, NO_KEY), env)


def prepare_headroom(home: Path, place: Place) -> Launch:
    """Compression off: what its proxy costs before it does its work."""
    command = [str(home / "bin" / "headroom"), "proxy", "--host", "127.0.0.1", "--port", str(place.port)]
    command += ["--no-optimize", "--no-cache", "--no-rate-limit", "--no-http2", "--no-subscription-tracking"]
    command += ["--no-telemetry", "--openai-api-url", place.upstream]
    env = {"HOME": str(place.folder), "HEADROOM_OFFLINE": "1", "HEADROOM_TELEMETRY": "off"}
    env |= {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", "PATH": _path(home)}
    return Launch(tuple(command), (NO_KEY,), env, start_timeout_s=120)


def _path(home: Path) -> str:
    return f"{home / 'bin'}:{os.environ.get('PATH', '')}"


LITELLM: Final = "1.110.2"
PORTKEY: Final = "1.15.2"
PORTKEY_PACKAGE: Final = "@portkey-ai/gateway"
NO_KEY: Final = "authorization: Bearer none"
FERRO_KEY: Final = "sk-bench-" + "0123456789abcdef" * 2

_ROUTER: Final = partial(prepare_router, ("vllm-router",))
_SMG: Final = partial(prepare_router, ("smg", "launch", "--backend", "vllm"))

PEERS: Final = (
    Peer("nginx", "system", install_nginx, prepare_nginx),
    Peer("vllm-router", "0.1.17", pip_install("vllm-router==0.1.17"), _ROUTER),
    Peer("smg", "1.13.0", pip_install("smg==1.13.0"), _SMG),
    Peer("litellm", LITELLM, install_litellm, prepare_litellm),
    Peer("ferrogw", "1.5.10", pip_install("ferrogw==1.5.10"), prepare_ferro),
    Peer("portkey", PORTKEY, install_portkey, prepare_portkey),
    Peer("headroom", "0.42.0", pip_install("headroom-ai[proxy]==0.42.0"), prepare_headroom),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peers", description=(__doc__ or "").partition("\n")[0])
    add_arguments(parser)
    names = [spec.name for spec in OWN] + [peer.name for peer in PEERS]
    parser.add_argument("--peers", default=",".join(names), help="comma-separated; all: %(default)s")
    parser.add_argument(
        "--all-rows", action="store_true", help="every row of the bench, not only those of the bars"
    )
    args = parser.parse_args(argv)
    wanted = args.peers.split(",")
    if unknown := set(wanted) - set(names):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}")
    specs, absent = [spec for spec in OWN if spec.name in wanted], {}
    for peer in PEERS:
        if peer.name not in wanted:
            continue
        try:
            specs.append(ensure(peer))
        except InstallError as error:
            absent[peer.name] = str(error)
    rows = ALL_ROWS if args.all_rows else tuple(row for row in ALL_ROWS if row.name in BAR_ROWS)
    plan = make_plan(args, tuple(specs), rows)
    with tempfile.TemporaryDirectory(prefix="ctxgate-bench-") as folder:
        try:
            results = run_plan(replace(plan, starts=1), Path(folder), absent)
        except StartError as error:
            print(error, file=sys.stderr)
            return 1
    return finish(results, args.json)


if __name__ == "__main__":
    sys.exit(main())
