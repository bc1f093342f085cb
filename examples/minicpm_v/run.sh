#!/usr/bin/env bash
# Trains a tiny MiniCPM-V 2.0 on images, on two ranks: bash examples/minicpm_v/run.sh OUT_DIR
# README.md says what happens and what comes out.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${1:?"error: give the folder to write to: bash run.sh OUT_DIR"}
python=${PYTHON:-$root/.venv/bin/python}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# run.yaml with small numbers; a constant rate, so that a longer run begins like a shorter one
train() {
    "$python" -m torch.distributed.run --standalone --nproc-per-node 2 "$root/tools/pretrain_lora.py" \
        --config "$here/run.yaml" --model.path "$out/model" --model.dtype float32 --lora.rank 8 --lora.alpha 16 \
        --data.train "$out/train.json" --data.validation "$out/validation.json" --data.seq_length 96 \
        --optim.lr 3e-3 --optim.schedule constant --optim.warmup_ratio null --train.micro_batch_size 8 \
        --train.eval_every 0 --log.every 10 --checkpoint.dir "$out/run" "$@"
}

"$python" "$here/make_small.py" --out "$out"
train --train.steps 40
train --train.steps 80      # goes on from the checkpoint of step 40
"$python" "$root/tools/convert.py" export --source "$out/run" --format peft --out "$out/adapter"
"$python" "$root/tools/convert.py" export --source "$out/run" --format hf --merge --out "$out/merged"
"$python" "$here/summary.py" "$out"
