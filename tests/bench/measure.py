"""What the kernel knows about a process tree: CPU seconds and memory. Linux."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """The process and its living descendants."""
    found = [pid]
    for parent in found:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found.extend(int(child) for child in path.read_text().split())
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread ended while we looked
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of the tree, with that of descendants already waited for."""
    total = 0
    for member in tree(pid):
        try:
            # The second field is the command in brackets and may hold spaces.
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(value) for value in fields[11:15])
    return total / _TICKS


def machine_busy_seconds() -> float:
    """CPU time that all processes of the machine have taken, and what a hypervisor took from it."""
    fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / _TICKS


def rss_mb(pid: int) -> float:
    """Resident memory of the tree in MB; pages shared by its members count once each."""
    return _status_mb(pid, "VmRSS:")


def peak_mb(pid: int) -> float:
    """Sum of each member's highest resident memory so far, in MB."""
    return _status_mb(pid, "VmHWM:")


def machine() -> str:
    """The processor, as a reader of the figures needs it."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    system = os.uname()
    kernel = f"{system.sysname} {system.release.split('-')[0]}"
    return f"{len(os.sched_getaffinity(0))} cores of {model}, {kernel}"


def _status_mb(pid: int, field: str) -> float:
    total_kb = 0
    for member in tree(pid):
        try:
            lines = Path(f"/proc/{member}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total_kb += sum(int(line.split()[1]) for line in lines if line.startswith(field))
    return total_kb / 1024
