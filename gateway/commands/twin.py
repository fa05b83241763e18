"""`ctxgate twin`: a model of a vLLM server on a port of its own, without a GPU."""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import uvicorn

from ctxgate.gateway.extras import NEEDS_EVENTS, NEEDS_TWIN, has_events
from ctxgate.inference.kv_publisher import EventAddresses
from ctxgate.inference.twin_profile import PROFILES
from ctxgate.inference.twin_server import TwinServer, TwinSettings

if TYPE_CHECKING:
    import argparse

    from starlette.types import ASGIApp


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ctxgate twin`."""
    parser.add_argument("--profile", choices=sorted(PROFILES), default="standard", help="how fast it serves")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to bind; 0 picks a free one")
    parser.add_argument("--served-model-name", default="tiny", help="model name (default: %(default)s)")
    parser.add_argument("--block-size", type=_positive, default=16, help="tokens per cache block")
    parser.add_argument("--blocks", type=_positive, help="cache blocks, the null block included")
    parser.add_argument("--max-model-len", type=_positive, default=131072, help="window in tokens")
    parser.add_argument("--max-num-seqs", type=_positive, help="largest batch (default: the profile's)")
    parser.add_argument("--max-num-queued-reqs", type=_positive, help="unfinished requests before 503")
    parser.add_argument(
        "--time-scale",
        type=_scale,
        default=1.0,
        help="factor on every duration: 0.1 serves ten times faster, 0 as fast as it can",
    )
    parser.add_argument("--kv-events-endpoint", help="publish cache events there, as in tcp://*:5557")
    parser.add_argument("--kv-events-replay-endpoint", help="answer with earlier events there")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; 2 for unusable settings or a missing extra, 1 for a port in use."""
    try:
        import jinja2  # noqa: F401, PLC0415 - the extra, which the first prompt would ask for
        import tokenizers  # noqa: F401, PLC0415 - as above
    except ImportError as error:
        print(f"ctxgate twin: {error.name} is missing; the twin {NEEDS_TWIN}", file=sys.stderr)
        return 2
    addresses = None
    if args.kv_events_endpoint is not None:
        if not has_events():
            print(f"ctxgate twin: --kv-events-endpoint {NEEDS_EVENTS}", file=sys.stderr)
            return 2
        addresses = EventAddresses(args.kv_events_endpoint, args.kv_events_replay_endpoint)
    profile = PROFILES[args.profile].scaled(args.time_scale)
    if args.max_num_seqs is not None:
        profile = replace(profile, max_num_seqs=args.max_num_seqs)
    settings = TwinSettings(
        profile=profile,
        served_name=args.served_model_name,
        block_size=args.block_size,
        blocks=args.blocks,
        max_model_len=args.max_model_len,
        max_num_queued_reqs=args.max_num_queued_reqs,
        kv_events=addresses,
    )
    try:
        app = TwinServer(settings).app()
    except ValueError as error:
        print(f"ctxgate twin: {error}", file=sys.stderr)
        return 2
    try:
        listener = socket.create_server((args.host, args.port))
    except OSError as error:
        print(f"ctxgate twin: {args.host}:{args.port}: {error.strerror or error}", file=sys.stderr)
        return 1
    asyncio.run(_serve(app, listener))
    return 0


async def _serve(app: ASGIApp, listener: socket.socket) -> None:
    class Announcing(uvicorn.Server):
        """Says where it listens once it accepts connections."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                host, port = listener.getsockname()[:2]
                print(f"listening on http://{host}:{port}", flush=True)

    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=5)
    await Announcing(config).serve([listener])


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _scale(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value
