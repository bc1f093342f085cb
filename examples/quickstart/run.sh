#!/usr/bin/env bash
# `rankfold quickstart` of this checkout: bash examples/quickstart/run.sh [--python PATH] [options of the command]
#
# Installs into .venv first, unless --python names an interpreter that has the engine. README.md says what happens.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
python=
if [ "${1:-}" = --python ]; then
    [ $# -gt 1 ] || { echo "error: --python has no value: give the path of an interpreter." >&2; exit 2; }
    python=$2
    shift 2
fi
if [ -z "$python" ]; then
    bash "$root/tools/setup_venv.sh" train
    python=$root/.venv/bin/python
fi
name=reference
case " $* " in *" --model"*) name=own ;; esac
exec "$python" -m rankfold quickstart --out "$here/out/$name" "$@"
