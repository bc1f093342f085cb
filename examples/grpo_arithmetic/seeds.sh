#!/usr/bin/env bash
# The example with several seeds, and a chart of their rewards: bash examples/grpo_arithmetic/seeds.sh OUT_DIR [SEEDS]
# Each run has a folder of its own; what is there already is not run again.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${1:?"error: give the folder to write to: bash seeds.sh OUT_DIR"}
seeds=${2:-10}
python=${PYTHON:-$root/.venv/bin/python}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

for ((seed = 1; seed <= seeds; seed++)); do
    bash "$here/run.sh" "$out/seed_$seed" --train.seed "$seed"
done
"$python" "$here/seeds.py" "$out"
