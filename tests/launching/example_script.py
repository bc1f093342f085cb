"""The script of `examples/slurm/train.sbatch`: that of `rankfold launch slurm` without a job, for any run file.

`python -m tests.launching.example_script > examples/slurm/train.sbatch` writes it again.
"""

from __future__ import annotations

from rankfold.launching.slurm import USUAL_LIMIT, batch_lines, filled

_ABOUT = """\
# A run over several nodes under Slurm, which continues by itself after its time limit or a preemption:
#
#   sbatch --nodes 2 --gpus-per-node 8 examples/slurm/train.sbatch run.yaml --parallel.tensor 8
#
# What stands behind the configuration goes to the training. README.md beside this file says what each part is for."""
_GIVEN = r"""
if [[ $# -lt 1 ]]; then
    echo "usage: sbatch [--nodes N --gpus-per-node G] ${BASH_SOURCE[0]} CONFIG [OPTION VALUE]..." >&2
    exit 2
fi
config=$1
shift

# Slurm copies the script: the checkout is where sbatch was called, unless ENGINE says otherwise
engine=${ENGINE:-${SLURM_SUBMIT_DIR:-$PWD}}
python=${PYTHON:-$engine/.venv/bin/python}
export PYTHONPATH=$engine${PYTHONPATH:+:$PYTHONPATH}"""


def generic_script() -> str:
    """Returns the script that takes a run file and options as arguments: examples/slurm/train.sbatch."""
    return filled(
        ABOUT=_ABOUT,
        BATCH=batch_lines({"job-name": "train"}, USUAL_LIMIT, 300),
        FOLDERS=_GIVEN,
        RANKS="${SLURM_GPUS_ON_NODE:-1}",
        RUN_DIR="runs/$SLURM_JOB_NAME-$SLURM_JOB_ID",
        VARIABLES="",
        MAX_RESTARTS="0",
        GRACE="240",
        CONFIG='"$config"',
        WORDS="",
    )


if __name__ == "__main__":
    print(generic_script(), end="")
