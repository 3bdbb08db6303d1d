#!/usr/bin/env bash
# Gradescope runs this once, as root, while it builds the image. Set AUTOGRADER and AUTOGRADER_VENV to try it elsewhere.
set -euo pipefail
source="${AUTOGRADER:-/autograder}/source"
venv="${AUTOGRADER_VENV:-/opt/shardlings}"  # outside of /autograder, which submissions must not enter

export DEBIAN_FRONTEND=noninteractive
python=""
for name in python3.13 python3.12 python3.11 python3; do
  if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python="$name"; break; fi
done
packages=()
for need in make:make bwrap:bubblewrap setpriv:util-linux; do
  command -v "${need%:*}" >/dev/null || packages+=("${need#*:}")
done
if [ -z "$python" ]; then  # Ubuntu 22.04 has Python 3.10 by default, and a package of 3.11
  apt-get update -qq
  packages+=("$(apt-cache show python3.11-venv >/dev/null 2>&1 && echo python3.11-venv || echo python3-venv)")
  python="$([ "${packages[-1]}" = python3.11-venv ] && echo python3.11 || echo python3)"
fi
[ "${#packages[@]}" = 0 ] || apt-get install -y -qq "${packages[@]}"

umask 022  # submissions run this Python as another user
make -C "$source" env VENV="$venv" PYTHON="$python" EXTRAS=grader
