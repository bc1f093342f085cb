#!/usr/bin/env bash
# Every check that this machine can run: bash tests/run.sh [pytest arguments]
#
# Installs into .venv first. Goes through all checks even where one fails, and ends with a failure if any did.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 2
started=$SECONDS
bash tools/setup_venv.sh test || exit $?

# Tests start many processes; more threads than one in each would fight for the cores.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
python="$root/.venv/bin/python"
failed=()

check() {
    local name=$1
    shift
    printf '[tests %3ds] %s\n' "$((SECONDS - started))" "$name" >&2
    "$@" || failed+=("$name")
    return 0
}

check "ruff check" "$python" -m ruff check --quiet .
check "ruff format" "$python" -m ruff format --quiet --check .
check "mypy" "$python" -m mypy --no-error-summary

# Without arguments in two halves side by side: a test that starts several processes leaves one core idle for half of its
# time. What shares the cores takes longer, so a test's time limit is longer too.
halves() {
    local log status=0 other half=(tests/unit tests/kernels tests/wrong_inputs tests/faults)
    log=$(mktemp)
    "$python" -m pytest -q -o timeout=300 "${half[@]}" >"$log" 2>&1 &
    other=$!
    # shellcheck disable=SC2064  # the number of now
    trap "kill $other 2>/dev/null" EXIT # it does not see an interrupt
    "$python" -m pytest -q -o timeout=300 "${half[@]/#/--ignore=}" || status=1
    wait "$other" || status=1
    trap - EXIT
    printf '[tests %3ds] the other half:\n' "$((SECONDS - started))" >&2
    cat "$log"
    rm -f "$log"
    return $status
}

if [ $# -gt 0 ]; then
    check "pytest" "$python" -m pytest "$@"
else
    check "pytest, in two halves" halves
fi

if [ ${#failed[@]} -gt 0 ]; then
    printf '[tests %3ds] failed:' "$((SECONDS - started))" >&2
    printf ' %s;' "${failed[@]}" >&2
    echo >&2
    exit 1
fi
printf '[tests %3ds] all passed\n' "$((SECONDS - started))" >&2
