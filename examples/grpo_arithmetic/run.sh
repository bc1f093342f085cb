#!/usr/bin/env bash
# A tiny model learns sums from a reward: bash examples/grpo_arithmetic/run.sh OUT_DIR [OPTIONS OF THE SECOND TRAINING]
# README.md says what happens and what comes out. RANKS=2 trains on two tensor-parallel ranks.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${1:?"error: give the folder to write to: bash run.sh OUT_DIR"}
shift
python=${PYTHON:-$root/.venv/bin/python} ranks=${RANKS:-1}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

"$python" "$here/make_small.py" --out "$out"
"$python" "$root/tools/pretrain_lora.py" --config "$here/start.yaml" --model.path "$out/model" \
    --data.train "$out/taught.jsonl" --checkpoint.dir "$out/start"
if [ ! -d "$out/started" ]; then
    "$python" "$root/tools/convert.py" export --source "$out/start" --format hf --out "$out/started"
fi
train=("$root/tools/pretrain_lora.py")
if [ "$ranks" -gt 1 ]; then
    train=(-m torch.distributed.run --standalone --nproc-per-node "$ranks" "${train[@]}" --parallel.tensor "$ranks")
fi
"$python" "${train[@]}" --config "$here/small.yaml" --model.path "$out/started" --data.train "$out/prompts.jsonl" \
    --reward exact_match --reward "$here/rewards.py:short" --rollout.reward_weights 1,0.1 --checkpoint.dir "$out/run" "$@"
"$python" "$here/summary.py" "$out/run/metrics.jsonl"
