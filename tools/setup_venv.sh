#!/usr/bin/env bash
# Makes .venv in the repository, or brings it up to date: bash tools/setup_venv.sh [--gpu-stack] [extra ...]
#
# Extras are those of setup.py (test, peft, tensorboard, triton). Versions come from constraints.txt. Does nothing when
# setup.py, pyproject.toml, constraints.txt and csrc are as they were and the extras are installed.
#   --gpu-stack       makes .venv-gpu-stack instead, where the versions of constraints-gpu.txt take the place of others,
#                     of Python 3.12 where python3.12 is found, as GPU machines have it
#   PYTHON            interpreter to make it with; if unset, the first of python3, python3.12, python3.11 that is 3.11+
#   TORCH_INDEX_URL   further package index for torch: https://download.pytorch.org/whl/cpu spares a machine without a
#                     GPU gigabytes of CUDA packages
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=.venv
pins=(constraints.txt)
pythons=(python3 python3.12 python3.11)
if [ "${1:-}" = --gpu-stack ]; then
    shift
    venv=.venv-gpu-stack
    pins=(constraints-gpu.txt constraints.txt)
    pythons=(python3.12 python3 python3.11)
fi
python=$venv/bin/python
stamp=$venv/.setup-stamp
constraints=$venv/constraints.txt
started=$SECONDS

say() { printf '[setup %3ds] %s\n' "$((SECONDS - started))" "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-${pythons[@]}}; do
        if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "${PYTHON:-python3} is missing or older than Python 3.11, which is needed: install Python 3.11 or 3.12, or set" \
        "PYTHON to its path."
}

if [ -e $venv ] && ! new_enough "$python"; then
    fail "$root/$venv has no Python 3.11 or newer in it: remove that folder and start again."
fi
if [ -n "${PYTHON:-}" ] && [ -e $venv ] && [ "$("$PYTHON" -V 2>/dev/null)" != "$("$python" -V)" ]; then
    fail "$root/$venv has $("$python" -V), which $PYTHON, as PYTHON has it, is not: remove that folder, or unset PYTHON."
fi

installed=""
# A stamp is the checksum of what decides the versions, then the extras that are installed.
fingerprint=$(cat setup.py pyproject.toml "${pins[@]}" csrc/*.* | cksum | tr ' ' '-')
if [ -f "$stamp" ]; then
    read -r old installed <"$stamp" || true
    missing=""
    for extra in "$@"; do
        case " $installed " in *" $extra "*) ;; *) missing="$missing $extra" ;; esac
    done
    if [ "$old" = "$fingerprint" ] && [ -z "$missing" ]; then
        exit 0
    fi
fi
extras=$(printf '%s\n' $installed "$@" | sort -u | tr '\n' ' ')

if [ ! -e $venv ]; then
    interpreter=$(find_python)
    say "making $venv with $("$interpreter" --version 2>&1)"
    "$interpreter" -m venv $venv || fail "$interpreter cannot make a virtual environment: install its venv package."
fi

# Of a package that several files pin, the first one's pin counts.
awk -F '==' '!/==/ || !seen[$1]++' "${pins[@]}" >"$constraints"

# An index that names places on other machines makes pip warn of each one, dozens of times; errors pass.
install() {
    "$python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" "$@" \
        2> >(grep -v "^WARNING: Location '.*' is ignored" >&2 || true)
}

torch=$(grep '^torch==' "$constraints")
say "installing $torch"
install ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "$torch" setuptools
list=$(echo $extras | tr ' ' ',')
say "installing the project${list:+ with $list}"
# setuptools came with torch, so the build needs no environment of its own; its advice on editable installs is left out.
PYTHONWARNINGS=ignore install --no-build-isolation --editable ".${list:+[$list]}"
echo "$fingerprint $extras" >"$stamp"
say "ready"
