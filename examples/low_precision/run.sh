#!/usr/bin/env bash
# Trains a tiny NVFP4 model merge-aware, merges it into NVFP4 again, and has transformers read it:
#     bash examples/low_precision/run.sh OUT_DIR
# README.md says what happens and what comes out.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${1:?"error: give the folder to write to: bash run.sh OUT_DIR"}
python=${PYTHON:-$root/.venv/bin/python}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

"$python" "$here/make_small.py" --out "$out"
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 "$root/tools/pretrain_lora.py" \
    --config "$here/run.yaml" --model.path "$out/model" --parallel.tensor 2 \
    --data.train "$out/train.json" --data.validation "$out/validation.json" --data.seq_length 128 --optim.lr 1e-2 \
    --train.steps 40 --train.micro_batch_size 2 --train.global_batch_size 4 --log.every 10 --checkpoint.dir "$out/run"
"$python" -m rankfold export "$out/run" --merged --out "$out/merged"
"$python" "$here/compare.py" --before "$out/model" --after "$out/merged" --data "$out/validation.json"
