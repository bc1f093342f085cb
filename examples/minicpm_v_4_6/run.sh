#!/usr/bin/env bash
# Trains a tiny MiniCPM-V 4.6 on images, on two tensor-parallel ranks: bash examples/minicpm_v_4_6/run.sh OUT_DIR
# README.md says what happens and what comes out.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${1:?"error: give the folder to write to: bash run.sh OUT_DIR"}
python=${PYTHON:-$root/.venv/bin/python}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

"$python" "$here/make_small.py" --out "$out"
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 "$root/tools/pretrain_lora.py" \
    --config "$here/run.yaml" --model.path "$out/model" --model.dtype float32 --data.train "$out/train.json" \
    --data.validation "$out/validation.json" --data.seq_length 192 --optim.lr 1e-2 --train.epochs null \
    --train.steps 40 --train.micro_batch_size 2 --train.global_batch_size 4 --train.eval_every 0 --log.every 10 \
    --checkpoint.dir "$out/run"
"$python" "$root/tools/convert.py" export --source "$out/run" --format peft --out "$out/adapter"
"$python" "$root/tools/convert.py" export --source "$out/run" --format hf --merge --out "$out/merged"
"$python" "$root/tools/generate.py" --model "$out/merged" --image "$out/images/validation_000.png" \
    --prompt "What is in the picture?" --chat --max-new-tokens 12
