"""Slurm: a batch script. `examples/slurm/train.sbatch` is this template without a job, for any run file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from rankfold.launching.job import Job

_TEMPLATE = r"""#!/usr/bin/env bash
@ABOUT@
@BATCH@
set -euo pipefail
@FOLDERS@
ranks_per_node=${RANKS_PER_NODE:-@RANKS@}

# ranks meet on the first node of the job; the port follows from the job, so that two jobs on a node do not share one
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 20000))

# a fixed name, which the requeued job finds again; an option on the command line that names another one wins
run_dir=${RUN_DIR:-@RUN_DIR@}

threads=$((${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}} / ranks_per_node))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# srun does not take this from the job
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
@VARIABLES@
launch=(
    "$python" -m rankfold train
    --nproc "$ranks_per_node"
    --nnodes "$SLURM_JOB_NUM_NODES"
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
    --rdzv-endpoint "${nodes[0]}:$port"
    --max-restarts "${MAX_RESTARTS:-@MAX_RESTARTS@}"
    --shutdown-timeout "${SHUTDOWN_TIMEOUT:-@GRACE@}"
    --config @CONFIG@
    --checkpoint.dir "$run_dir"
@WORDS@    "$@"
)
echo "job $SLURM_JOB_ID on $SLURM_JOB_NUM_NODES nodes, $ranks_per_node ranks each, folder $run_dir"

# told to stop, by the limit or by a preemption, all ranks finish the step under way and save
stopping=0
# shellcheck disable=SC2317,SC2329  # called by the trap
stop() {
    stopping=1
    scancel --signal=TERM "$SLURM_JOB_ID.0" || true
}
trap stop USR1 TERM

# a task is all ranks of a node, so it is not bound to a core
srun --kill-on-bad-exit=1 --cpu-bind=none "${launch[@]}" &
step=$!
# a signal ends `wait`, not the step
while :; do
    status=0
    wait "$step" || status=$?
    kill -0 "$step" 2>/dev/null || break
done

# 75 is a run that was stopped and has saved, on whichever node it heard of that
if [[ $status -eq 75 || ($stopping -eq 1 && $status -ne 0) ]]; then
    echo "stopped by the scheduler: the job goes back into the queue, and on from its last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$status"
"""
USUAL_LIMIT = "24:00:00"
"""Of a job that is given none."""


def script(job: Job, about: str) -> str:
    """Returns the script of a job; what is given to it behind its name goes to the training.

    Args:
        about: a comment at its top.
    """
    options: dict[str, str | None] = {"job-name": job.name, "nodes": str(job.nodes)}
    if job.gpus:
        options["gpus-per-node"] = str(job.gpus)
    if job.cpus is not None:
        options["cpus-per-task"] = str(job.cpus)
    if job.memory is not None:
        options["mem"] = f"{job.memory * 1024:.0f}M"
    if job.workdir is not None:
        options["chdir"] = job.workdir
    variables = [f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()]
    variables += [f': "${{{name}:?is not set: export it before sbatch}}"' for name in job.secrets]
    words = "".join(f"    {shlex.quote(word)}\n" for word in job.words)
    return filled(
        ABOUT=f"# {about}\n# Options of the run may stand behind its name: sbatch FILE [OPTION VALUE]...",
        BATCH=batch_lines(options, _limit(job.seconds), notice_before_limit(job.grace), job.batch_options),
        FOLDERS=f"\npython=${{PYTHON:-{shlex.quote(job.python)}}}",
        RANKS=str(job.ranks),
        RUN_DIR="runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" if job.run_dir is None else shlex.quote(job.run_dir),
        VARIABLES="".join(f"{line}\n" for line in variables),
        MAX_RESTARTS=str(job.max_restarts),
        GRACE=str(job.grace),
        CONFIG=shlex.quote(job.config_path),
        WORDS=words,
    )


def notice_before_limit(grace: int) -> int:
    """Returns how many seconds before its limit a job is told of it.

    Args:
        grace: seconds that a save may take; the step under way comes before it.
    """
    return grace + 60


def batch_lines(
    options: Mapping[str, str | None], limit: str, notice: int, further: Mapping[str, str | None] | None = None
) -> str:
    """Returns the lines of options.

    Args:
        options: of the job.
        limit: of its time.
        notice: seconds before it.
        further: the user's options, which win.
    """
    found: dict[str, str | None] = {
        **options, "ntasks-per-node": "1", "exclusive": None, "time": limit, "requeue": None, "open-mode": "append",
        "output": "%x-%j.log", **(further or {}),
    }  # fmt: skip
    lines = [f"#SBATCH --{name}" + ("" if value is None else f"={_quoted(value)}") for name, value in found.items()]
    lines += [
        "# this script is told so many seconds before the limit; it is the time that the last save may take",
        f"#SBATCH --signal=B:USR1@{notice}",
    ]
    return "\n".join(lines)


def _quoted(value: str) -> str:
    """Returns a value as sbatch reads it: it divides lines at spaces, outside of quotes, and ends them at #."""
    if re.fullmatch(r"[\w@%+=:,./\[\]*-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _limit(seconds: int | None) -> str:
    if seconds is None:
        return USUAL_LIMIT
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def filled(**parts: str) -> str:
    """Returns the script with these parts in their places."""
    return re.sub(r"@([A-Z_]+)@", lambda found: parts[found[1]], _TEMPLATE)
