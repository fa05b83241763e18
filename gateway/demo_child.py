"""A `ctxgate` command that ends with the process that started it, however that one ends.

    python -P -m ctxgate.gateway.demo_child PARENT ARGUMENT...

A parent that is killed cannot end its children; so each asks the kernel for it (prctl(2),
PR_SET_PDEATHSIG). The child does that for itself, which spares the parent code between fork and exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING, Final

from ctxgate.gateway import cli

if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_PDEATHSIG: Final = 1


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. Elsewhere than on Linux: no effect."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the kernel was asked
        raise SystemExit(1)


def main(arguments: Sequence[str]) -> int:
    """Run `ctxgate` with all arguments but the first, which is the parent's process id."""
    end_with(int(arguments[0]))
    return cli.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
