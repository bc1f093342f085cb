#!/usr/bin/env bash
# A tiny model learns to use a tool: bash examples/agent_tools/run.sh OUT_DIR [OPTIONS OF THE SECOND TRAINING]
# README.md says what happens and what comes out. ENVIRONMENT=BlankNote takes away what the tool tells, and RANKS=2
# trains on two tensor-parallel ranks.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${1:?"error: give the folder to write to: bash run.sh OUT_DIR"}
shift
python=${PYTHON:-$root/.venv/bin/python} ranks=${RANKS:-1} environment=${ENVIRONMENT:-Door}
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
    --rollout.environment "$here/env.py:$environment" --checkpoint.dir "$out/$environment" "$@"
"$python" "$root/examples/grpo_arithmetic/summary.py" "$out/$environment/metrics.jsonl"
