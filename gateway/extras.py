"""What to say where a command needs an extra that is not installed."""

from __future__ import annotations

from typing import Final

INSTALL_TWIN: Final = "pip install '.[twin]' in a checkout, pip install 'ctxgate[twin]' elsewhere"
NEEDS_TWIN: Final = f"needs the extra `twin`: {INSTALL_TWIN}"
