#!/usr/bin/env bash
# The job at a small scale on a CPU, end to end: bash run_small.sh OUT_DIR [--runs N] [options of the engine]
# Writes OUT_DIR/result_0.txt, the log of a run that reached the target, and OUT_DIR/aborted.txt, that of a run which was
# given too few steps; with --runs 10 also result_1.txt and so on, for package.py. Below OUT_DIR/work is what is made:
# texts, a base model that has read plain text, rows. Run again, it uses that, and writes new logs.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
out=${1:?"error: give the folder to write to: bash run_small.sh OUT_DIR"}
shift
runs=1
if [[ ${1:-} == --runs ]]; then
    runs=${2:?"error: --runs has no number"}
    shift 2
fi
python=${PYTHON:-$root/.venv/bin/python}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'import mlperf_logging' 2>/dev/null || {
    echo "error: mlperf-logging, which writes and checks the logs, is not installed: run \`bash tools/setup_venv.sh mlperf\`." >&2
    exit 2
}
work=$out/work
mkdir -p "$work"
rm -f "$out"/result_*.txt "$out"/aborted.txt
rm -rf "$work"/run_*

if [[ ! -f $work/base/config.json ]]; then
    rm -rf "$work"/{raw,model,pretrain,base}
    "$python" "$here/make_small.py" --out "$work"
    "$python" "$root/tools/pretrain_lora.py" --config "$here/small_pretrain.yaml" --model.path "$work/model" \
        --data.train "$work/text.txt" --checkpoint.dir "$work/pretrain"
    "$python" "$root/tools/convert.py" export --source "$work/pretrain" --format hf --out "$work/base"
fi
"$python" "$here/prepare_data.py" raw --source "$work/raw" --tokenizer "$work/model" --out "$work/data" --seq-length 128

# one run: its log, the folder of its checkpoint, its seed, more options
run() {
    "$python" "$here/train.py" --small --result "$out/$1" --org example --platform small_cpu --config "$here/small.yaml" \
        --model.path "$work/base" --data.train "$work/data/train.jsonl" --data.validation "$work/data/validation.jsonl" \
        --checkpoint.dir "$work/run_$2" --train.seed "$3" "${@:4}"
}

# whether a log says that the target was reached
reached() {
    grep -q '"run_stop".*"status": "success"' "$out/$1"
}

status=0
for ((number = 0; number < runs; number++)); do
    run "result_$number.txt" "$number" $((1000 + number)) "$@"
    reached "result_$number.txt" || status=1
done
run aborted.txt aborted 999 --train.steps 200
if reached aborted.txt; then
    echo "error: a run of 200 steps reached the target" >&2
    exit 1
fi
exit $status
