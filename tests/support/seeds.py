"""The same program in interpreters of other hash seeds: what it prints must not depend on them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def printed(program: str, text: str, *seeds: str) -> set[str]:
    """What a program prints that reads `text`, run once per seed; it may import what tests import."""
    tests = str(Path(__file__).parents[1])
    return {
        subprocess.run(
            [sys.executable, "-c", program],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": tests},
        ).stdout
        for seed in seeds
    }
