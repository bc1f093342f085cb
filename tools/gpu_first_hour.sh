#!/usr/bin/env bash
# What to run first on a machine with a GPU: bash tools/gpu_first_hour.sh OUT [PART ...]   (--help says more)
#
# Needs torch, triton, transformers and peft, for some parts pytest, einops, jsonargparse and docstring-parser, and
# nothing installed of this repository. PYTHON names the interpreter; without it .venv's is taken where there is one.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# by the door of all commands, which says in one sentence what is not installed
exec "$python" -c 'from rankfold.__main__ import run; run("benchmarking.first_hour.run")' "$@"
