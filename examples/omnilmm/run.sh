#!/usr/bin/env bash
# Trains a tiny OmniLMM, merges it in pieces and asks it about an image, on two ranks:
#   bash examples/omnilmm/run.sh OUT_DIR
# README.md says what happens and what comes out.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${1:?"error: give the folder to write to: bash run.sh OUT_DIR"}
python=${PYTHON:-$root/.venv/bin/python}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
two_ranks=("$python" -m torch.distributed.run --standalone --nproc-per-node 2)

"$python" "$here/make_small.py" --out "$out"
"${two_ranks[@]}" "$root/tools/pretrain_lora.py" --config "$here/run.yaml" --model.path "$out/model" \
    --model.dtype float32 --data.train "$out/train.json" --data.validation "$out/validation.json" \
    --data.seq_length 192 --optim.lr 3e-3 --optim.lr_pattern '{resampler: 1e-3}' --optim.schedule constant \
    --optim.warmup_ratio null --train.epochs null --train.steps 40 --train.micro_batch_size 8 \
    --train.global_batch_size 8 --train.eval_every 0 --log.every 10 --checkpoint.dir "$out/run"
"$python" "$root/tools/convert.py" export --source "$out/run" --format hf --merge --out "$out/merged" \
    --max-shard-gb 0.0005 --verify
ls "$out/merged"
ask() {
    "${two_ranks[@]}" "$root/tools/generate.py" --tensor 2 --image "$out/images/validation_000.png" \
        --prompt "What do you see?" --max-new-tokens 12 "$@"
}
ask --model "$out/model" --adapter "$out/run"   # the run's weights beside the model's
ask --model "$out/merged"                       # answers the same
