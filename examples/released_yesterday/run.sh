#!/usr/bin/env bash
# Trains, exports and asks two tiny models of types that the engine has no family for:
#     bash examples/released_yesterday/run.sh OUT_DIR
# README.md says what happens and what comes out.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${1:?"error: give the folder to write to: bash run.sh OUT_DIR"}
python=${PYTHON:-$root/.venv/bin/python}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

"$python" "$here/make_small.py" --out "$out"
for name in model mixture; do
    "$python" -m torch.distributed.run --standalone --nproc-per-node 2 "$root/tools/pretrain_lora.py" \
        --config "$here/$name.yaml" --model.path "$out/$name" --model.dtype float32 --parallel.tensor 2 \
        --data.train "$out/train.json" --data.validation "$out/validation.json" --data.seq_length 96 \
        --optim.lr 1e-2 --train.steps 40 --train.micro_batch_size 2 --train.global_batch_size 4 \
        --train.eval_every 0 --log.every 10 --checkpoint.dir "$out/run-$name"
    "$python" "$root/tools/convert.py" export --source "$out/run-$name" --format peft --out "$out/adapter-$name"
    "$python" "$root/tools/convert.py" export --source "$out/run-$name" --format hf --merge --out "$out/merged-$name"
    "$python" "$root/tools/generate.py" --model "$out/merged-$name" --prompt "Which is larger, two or nine?" --chat \
        --max-new-tokens 8
done
