"""`ctxgate serve`: run the gateway for a configuration file."""

from __future__ import annotations

import ctypes
import gc
import logging
import platform
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import argparse

    import uvicorn

    from ctxgate.gateway.app import Application

DEFAULT_CONFIG: Final = "configs/ctxgate.yaml"
KEEP_ALIVE_S: Final = 75  # longer than any client's own pool, so that the client is the one to close
STALLED_MS: Final = 120_000  # a client that reads nothing for so long has gone
_PROBE_IDLE_S: Final = 30
GRACE_S: Final = 28.0  # below the 30 s after which Kubernetes kills, so that the ledger is closed in time
CALL_OFF_AFTER_S: Final = 15.0
# The ledger's writer thread commits within a request's own time; Python's 5 ms turn would be most of it.
_SWITCH_INTERVAL_S: Final = 0.0005
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 64 * 2**20
_COLLECT_EVERY: Final = 20_000  # new containers
_LARGEST_IN_HEAP: Final = 32 * 2**20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("-c", "--config", default=DEFAULT_CONFIG, help="configuration (default: %(default)s)")
    parser.add_argument("--port", type=int, help="listen on this port instead; 0 picks a free one")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it; 2 when the configuration, the address or the ledger cannot be used.

    1 when it did not start, or did not end in order: the ledger may then have lost settlements.
    """
    from ctxgate.gateway.config_load import read  # noqa: PLC0415 - a command pays only for what it uses
    from ctxgate.gateway.config_yaml import ConfigError  # noqa: PLC0415 - as above

    try:
        loaded = read(Path(args.config))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    config = loaded.config
    logging.basicConfig(
        level=args.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    port = config.listen.port if args.port is None else args.port
    try:
        listener = listen(config.listen.host, port)
    except OSError as error:
        print(f"cannot listen on {config.listen.host}:{port}: {error.strerror}", file=sys.stderr)
        return 2
    from ctxgate.gateway.app import Application  # noqa: PLC0415 - as above
    from ctxgate.gateway.ledger import LedgerError  # noqa: PLC0415 - as above
    from ctxgate.gateway.reload import Reloader  # noqa: PLC0415 - as above
    from ctxgate.gateway.stores.sqlite import check  # noqa: PLC0415 - as above

    try:
        check(config.store)
    except LedgerError as error:
        listener.close()
        print(f"cannot use the ledger {error}", file=sys.stderr)
        return 2
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    keep_freed_memory()
    application = Application(config)
    server = make_server(application, args.log_level)
    application.reloader = Reloader(application, Path(args.config))
    spare_the_collector()
    print(f"ctxgate listening on {_address(listener)}", flush=True)
    end_cleanly(server)
    server.run(sockets=[listener])
    failed = server.lifespan.should_exit  # at its end as at its start: settlements may be lost
    return 0 if server.started and not failed else 1


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def end_cleanly(server: uvicorn.Server) -> None:
    """Let SIGTERM and SIGINT end the server with exit code 0.

    uvicorn raises a signal again once it has shut down; the default handlers would then end the process
    as if it had been killed. With its own handler in their place the second one changes nothing.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; connections queue from now on, before the application is ready.

    Its connections inherit its settings: an answer's parts leave at once, and the kernel disconnects a
    client that takes nothing of an answer for `STALLED_MS`, or that has vanished without a word.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_IDLE_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_IDLE_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_MS)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    listener.set_inheritable(True)
    return listener


def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory instead of giving it back after each large body.

    A body of megabytes is copied a few times on its way; fetching those pages anew from the kernel for
    every request costs more than all the work on them (mallopt(3)). Elsewhere than on glibc: no effect.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def spare_the_collector() -> None:
    """Leave what is loaded now out of every garbage collection, and collect seldom.

    Requests leave hardly any cycles behind, so that most collections walk the same modules for nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY, 20, 100)


def make_server(
    app: Application, log_level: str, *, grace_s: float = GRACE_S, call_off_after_s: float = CALL_OFF_AFTER_S
) -> uvicorn.Server:
    """uvicorn on uvloop and httptools, without an access log: paths and addresses are the clients' own."""
    import uvicorn  # noqa: PLC0415 - as above

    from ctxgate.gateway.http_protocol import HttpProtocol  # noqa: PLC0415 - as above
    from ctxgate.gateway.server import GracefulServer  # noqa: PLC0415 - as above

    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=HttpProtocol,
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning" if log_level == "info" else log_level,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(grace_s),
        server_header=False,
        proxy_headers=False,
    )
    return GracefulServer(config, app, call_off_after_s)
