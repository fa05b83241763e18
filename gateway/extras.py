"""What to say where something needs an extra that is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

INSTALL_TWIN: Final = "pip install '.[twin]' in a checkout, pip install 'ctxgate[twin]' elsewhere"
NEEDS_TWIN: Final = f"needs the extra `twin`: {INSTALL_TWIN}"
NEEDS_EVENTS: Final = (
    "needs the extra `events`: pip install '.[events]' in a checkout, pip install 'ctxgate[events]' elsewhere"
)
NEEDS_PROVIDERS: Final = (
    "needs the extra `providers`: pip install '.[providers]' in a checkout, pip install "
    "'ctxgate[providers]' elsewhere"
)


def has_events() -> bool:
    """Whether event streams can be heard here."""
    return find_spec("zmq") is not None
