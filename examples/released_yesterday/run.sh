#!/usr/bin/env bash
# Trains, exports and asks three tiny models of types that the engine has no family for:
#     bash examples/released_yesterday/run.sh OUT_DIR
# README.md says what happens and what comes out.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${1:?"error: give the folder to write to: bash run.sh OUT_DIR"}
python=${PYTHON:-$root/.venv/bin/python}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

"$python" "$here/make_small.py" --out "$out"
for name in model mixture images; do
    records=$out question=(--prompt "Which is larger, two or nine?")
    if [ $name = images ]; then
        records=$out/pictures
        question=(--prompt "What is in the picture?" --image "$records/images/validation_000.png")
    fi
    "$python" -m torch.distributed.run --standalone --nproc-per-node 2 "$root/tools/pretrain_lora.py" \
        --config "$here/$name.yaml" --model.path "$out/$name" --model.dtype float32 --parallel.tensor 2 \
        --data.train "$records/train.json" --data.validation "$records/validation.json" --data.seq_length 96 \
        --optim.lr 1e-2 --train.steps 40 --train.micro_batch_size 2 --train.global_batch_size 4 \
        --train.eval_every 0 --log.every 10 --checkpoint.dir "$out/run-$name"
    "$python" "$root/tools/plan.py" certify --config "$out/run-$name/config.yaml" --steps 2
    "$python" "$root/tools/convert.py" export --source "$out/run-$name" --format peft --out "$out/adapter-$name"
    "$python" "$root/tools/convert.py" export --source "$out/run-$name" --format hf --merge --out "$out/merged-$name"
    "$python" "$root/tools/generate.py" --model "$out/merged-$name" "${question[@]}" --chat --max-new-tokens 12
done
