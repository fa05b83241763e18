"""What the client is told of pools at hosted providers, at the start and after each reload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxgate.inference.providers import AnyClient, Hosted

if TYPE_CHECKING:
    from ctxgate.gateway.config import Config
    from ctxgate.inference.client import UpstreamClient


def serve_hosted(client: UpstreamClient, config: Config) -> None:
    """Let a client call the configuration's providers; the first ones begin to load their library."""
    if isinstance(client, AnyClient):
        client.serve(hosted(config))


def hosted(config: Config) -> dict[str, Hosted]:
    """The pools at providers, by name."""
    return {
        name: Hosted(
            pool.provider.model,
            pool.provider.api_key,
            pool.provider.base_url,
            tuple({one.engine_name: None for one in config.models.values() if name in one.pools}),
            pool.provider.window,
        )
        for name, pool in config.pools.items()
        if pool.provider is not None
    }
