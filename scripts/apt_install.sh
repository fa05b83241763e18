#!/usr/bin/env bash
# Install Debian packages quietly; the whole output is shown when it fails. Without root or apt-get: say what
# is missing and fail.
set -euo pipefail

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "make: $* is missing; install it with your system's packages (apt-get install $*) and try again" >&2
  exit 1
fi
echo "make: installing $* with apt-get"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"; } >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
