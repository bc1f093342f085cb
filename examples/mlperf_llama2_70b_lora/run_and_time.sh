#!/usr/bin/env bash
# One timed run of MLPerf's llama2_70b_lora: bash run_and_time.sh RESULT_FILE [options of the engine, such as --parallel.context 2]
# Environment: MODEL (folder of Llama-2-70B), DATA (folder that prepare_data.py wrote), ORG, PLATFORM (name of the system);
# SEED (drawn where it is not set), GPUS (default 8), NODES (1), NODE_RANK (0), MASTER (localhost:29500), CONFIG,
# RUN_DIR (where checkpoints and metrics go), CLEAR_CACHES (1 asks the system to drop its caches first; needs root).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
result=${1:?"error: give the result file to write: bash run_and_time.sh result_0.txt"}
shift
for name in MODEL DATA ORG PLATFORM; do
    [[ -n "${!name:-}" ]] || { echo "error: $name is not set: the head of run_and_time.sh says what it is." >&2; exit 2; }
done
python=${PYTHON:-$here/../../.venv/bin/python}
[[ -d $MODEL ]] || { echo "error: MODEL is $MODEL, which is not a folder: give the folder of Llama-2-70B." >&2; exit 2; }
for name in train validation; do
    [[ -f $DATA/$name.jsonl ]] || { echo "error: $DATA/$name.jsonl is missing: write it with prepare_data.py." >&2; exit 2; }
done
"$python" -c 'import mlperf_logging' 2>/dev/null || {
    echo "error: mlperf-logging, which writes the log, is not installed: run \`bash tools/setup_venv.sh mlperf\`." >&2
    exit 2
}
nodes=${NODES:-1}
seed=${SEED:-}
if [[ -z $seed ]]; then
    [[ $nodes == 1 ]] || { echo "error: SEED is not set, and $nodes nodes need the same one: set it." >&2; exit 2; }
    seed=$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')
fi
cleared=()
if [[ ${CLEAR_CACHES:-0} == 1 ]]; then
    sync
    echo 3 > /proc/sys/vm/drop_caches || { echo "error: the caches cannot be dropped: be root, or set CLEAR_CACHES=0." >&2; exit 2; }
    cleared=(--caches-cleared)
fi
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"

echo "STARTING TIMING RUN AT $(date '+%F %T')"
begin=$(date +%s)
status=0
"$python" -m torch.distributed.run --nnodes "$nodes" --node-rank "${NODE_RANK:-0}" --nproc-per-node "${GPUS:-8}" \
    --rdzv-backend static --rdzv-endpoint "${MASTER:-localhost:29500}" "$here/train.py" \
    --result "$result" --org "$ORG" --platform "$PLATFORM" "${cleared[@]}" \
    --config "${CONFIG:-$here/llama2_70b_lora.yaml}" --model.path "$MODEL" --data.train "$DATA/train.jsonl" \
    --data.validation "$DATA/validation.jsonl" --train.seed "$seed" --checkpoint.dir "${RUN_DIR:-$result.run}" "$@" \
    || status=$?
echo "ENDING TIMING RUN AT $(date '+%F %T')"
seconds=$(($(date +%s) - begin))
# the first node has the log
if [[ $status == 0 && ${NODE_RANK:-0} == 0 ]] && ! grep -q '"run_stop".*"status": "success"' "$result"; then
    status=1
fi
if [[ $status == 0 ]]; then
    echo "RESULT,llama2_70b_lora,$seed,$seconds,$ORG,$(date '+%F %T')"
else
    echo "no result: the run ended after $seconds s without reaching the target" >&2
fi
exit $status
