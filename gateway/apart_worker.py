"""The other side of `gateway.apart`: reads its work to the end, does it, writes the result.

Imports nothing of the gateway, so that it is there in some tens of milliseconds.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

NICENESS = 10  # requests go first


def main() -> None:
    """Do the work that the arguments name."""
    os.nice(NICENESS)
    module, _, name = sys.argv[1].partition(":")
    function = getattr(import_module(module), name)
    work = sys.stdin.buffer.read()
    if work:  # none comes where the gateway has died or changed its mind
        sys.stdout.buffer.write(function(work))


if __name__ == "__main__":
    main()
