#!/usr/bin/env bash
# Make a virtual environment at $1 with $PYTHON (default python3), or keep the one that works there.
# Debian's python3 has neither venv nor ensurepip: as root they are installed, else the message says how.
set -euo pipefail

target=$1
python=${PYTHON:-python3}

if "$target/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
   "$target/bin/python" -m pip --version >/dev/null 2>&1; then
  exit 0
fi

if ! command -v "$python" >/dev/null; then
  echo "make: no $python on the PATH; install Python 3.11 or newer, or name it: make PYTHON=/path/to/python ..." >&2
  exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "make: $("$python" --version) is too old, Python 3.11 or newer is needed: make PYTHON=/path/to/python ..." >&2
  exit 1
fi

if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
  "$(dirname "$0")/apt_install.sh" "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
fi

echo "make: making the environment $target"
"$python" -m venv --clear "$target"
