#!/usr/bin/env bash
# DPO of MiniMind on several ranks; README.md says what happens and what came out.
#   bash examples/minimind_dpo/run.sh --data PAIRS.jsonl --model MINIMIND_HF_DIR [--out DIR] [--ranks 2] [-- OPTIONS]
#   bash examples/minimind_dpo/run.sh --data PAIRS.jsonl --tokenizer DIR ...     its shape, from random weights
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
data= model= tokenizer= out=minimind_dpo ranks=2 more=()
while [ $# -gt 0 ]; do
    case $1 in
        --data) data=$2; shift 2 ;;
        --model) model=$2; shift 2 ;;
        --tokenizer) tokenizer=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        --ranks) ranks=$2; shift 2 ;;
        --pairs | --hidden | --layers) more+=("$1" "$2"); shift 2 ;;
        --) shift; break ;;
        *) echo "error: $1 is no option of run.sh: see its first lines." >&2; exit 2 ;;
    esac
done
if [ -z "$data" ] || { [ -z "$model" ] && [ -z "$tokenizer" ]; }; then
    echo "error: --data and one of --model and --tokenizer are needed: see the first lines of run.sh." >&2
    exit 2
fi
python=${PYTHON:-$root/.venv/bin/python}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

init=checkpoint
prepare=(--data "$data" --out "$out")
if [ -z "$model" ]; then
    init=random model=$out/model
    prepare+=(--tokenizer "$tokenizer")
fi
"$python" "$here/prepare.py" "${prepare[@]}" ${more[@]+"${more[@]}"}
"$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$root/tools/pretrain_lora.py" \
    --config "$here/dpo.yaml" --model.path "$model" --model.init "$init" \
    --data.train "$out/train.jsonl" --data.validation "$out/held_out.jsonl" --checkpoint.dir "$out/run" "$@"
"$python" "$root/tools/convert.py" export --source "$out/run" --out "$out/hf" --format hf
"$python" "$here/summary.py" "$out/run/metrics.jsonl"
