#!/usr/bin/env bash
# Every check that this machine can run: bash tests/run.sh [--gpu-stack] [pytest arguments]
#
# Installs into .venv first. Goes through all checks even where one fails, and ends with a failure if any did.
#   --gpu-stack   the tests alone, with the versions of constraints-gpu.txt, in .venv-gpu-stack
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 2
started=$SECONDS
venv=.venv
setup=(test)
if [ "${1:-}" = --gpu-stack ]; then
    shift
    venv=.venv-gpu-stack
    setup=(--gpu-stack test)
fi
bash tools/setup_venv.sh "${setup[@]}" || exit $?

# Tests start many processes; more threads than one in each would fight for the cores.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
python="$root/$venv/bin/python"
failed=()
unsteady=()

check() {
    local name=$1
    shift
    printf '[tests %3ds] %s\n' "$((SECONDS - started))" "$name" >&2
    "$@" || failed+=("$name")
    return 0
}

if [ "$venv" = .venv ]; then
    check "ruff check" "$python" -m ruff check --quiet .
    check "ruff format" "$python" -m ruff format --quiet --check .
    if [ $# -gt 0 ]; then check "mypy" "$python" -m mypy --no-error-summary; fi
fi

# Without arguments in four lanes side by side, of about the same length, with mypy and the core's tests in a copy
# without a wing beside them: a test that starts several processes leaves one core idle for half of its time. What shares
# the cores takes longer, so a test's time limit is longer too.
lanes() {
    local first=(tests/unit/test_[a-h]*.py)
    local names=("tests/kernels tests/distributed tests/small_runs" "tests/parity and tests/unit, a to h" "tests/faults, tests/serving and tests/unit, i to z")
    local folders=("${names[0]}" "tests/parity ${first[*]}" "tests/faults tests/serving tests/unit ${first[*]/#/--ignore=}") # Triton's interpreter needs kernels first
    local rest=(--ignore=tests/unit --ignore=tests/parity --ignore=tests/faults --ignore=tests/serving) logs=() running=() titles=() status=0 lane folder caches
    local -A ended=()
    local pytest=("$python" -m pytest -q -o timeout=300)
    caches=$(mktemp -d)
    if [ "$venv" = .venv ]; then
        logs+=("$(mktemp)")
        "$python" -m mypy --no-error-summary >"${logs[-1]}" 2>&1 &
        running+=($!)
        titles+=("mypy")
    fi
    if [ "$venv" = .venv ] && [ -e .git ]; then # it copies the files that git knows
        logs+=("$(mktemp)")
        "$python" -m tests.without_wing -otimeout=300 >"${logs[-1]}" 2>&1 &
        running+=($!)
        titles+=("the core without a wing")
    fi
    for folder in ${folders[0]}; do rest+=("--ignore=$folder"); done
    for lane in "${!folders[@]}"; do
        logs+=("$(mktemp)")
        # shellcheck disable=SC2086  # several words
        "${pytest[@]}" -o "cache_dir=$caches/${#running[@]}" ${folders[lane]} >"${logs[-1]}" 2>&1 &
        running+=($!)
        titles+=("${names[lane]}")
    done
    # shellcheck disable=SC2064  # the numbers and names of now
    trap "kill ${running[*]} 2>/dev/null; rm -rf ${logs[*]} $caches" EXIT # lanes behind do not see an interrupt
    trap 'exit 130' INT
    trap 'exit 143' TERM
    "${pytest[@]}" -o "cache_dir=$caches/rest" "${rest[@]}" || ended[rest]=$?
    for lane in "${!running[@]}"; do
        wait "${running[lane]}" || ended[$lane]=$?
        printf '[tests %3ds] %s:\n' "$((SECONDS - started))" "${titles[lane]}" >&2
        cat "${logs[lane]}"
    done
    for lane in "${!ended[@]}"; do again "${ended[$lane]}" "$caches/$lane" || status=1; done
    rm -rf "${logs[@]}" "$caches"
    trap - EXIT INT TERM
    return $status
}

# A few tests that failed in a lane run once more by themselves. Time limits and races between processes show beside
# others first; one that passes now is named at the end, for somebody to look into, and does not fail the run.
again() {
    local tests=()
    if [ "$1" -eq 1 ] && [ -f "$2/v/cache/lastfailed" ]; then
        mapfile -t tests < <("$python" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' \
            "$2/v/cache/lastfailed")
    fi
    if [ ${#tests[@]} -eq 0 ] || [ ${#tests[@]} -gt 4 ]; then return 1; fi
    printf '[tests %3ds] once more: %s\n' "$((SECONDS - started))" "${tests[*]}" >&2
    "$python" -m pytest -q -o timeout=300 -p no:cacheprovider "${tests[@]}" || return 1
    unsteady+=("${tests[@]}")
}

if [ $# -gt 0 ]; then
    check "pytest" "$python" -m pytest "$@"
else
    check "mypy and pytest, in four lanes" lanes
fi

if [ ${#failed[@]} -gt 0 ]; then
    printf '[tests %3ds] failed:' "$((SECONDS - started))" >&2
    printf ' %s;' "${failed[@]}" >&2
    echo >&2
    exit 1
fi
if [ ${#unsteady[@]} -gt 0 ]; then
    printf '[tests %3ds] failed beside others and passed alone: %s\n' "$((SECONDS - started))" "${unsteady[*]}" >&2
fi
printf '[tests %3ds] all passed\n' "$((SECONDS - started))" >&2
