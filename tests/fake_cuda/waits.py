"""Where the host may wait for the device once the run has begun: file and function, and what for."""

from __future__ import annotations

from typing import NamedTuple


class Wait(NamedTuple):
    """A function in which the host may wait.

    Args:
        why: it may.
        within: what it calls may, too.
    """

    why: str
    within: bool = False


_GUARDS, _TRAINING = "engine/training/guards", "engine/training"

MAY_WAIT = {
    ("engine/layers/host_copies.py", "HostCopy.read"): Wait("for an event, behind which lie a pass or more"),
    (f"{_GUARDS}/replicas.py", "ReplicaGuard.finish"): Wait("copies differ, which ends the run", within=True),
    (f"{_GUARDS}/liveness.py", "LivenessGuard.verdict"): Wait("once in a run", within=True),
    (f"{_GUARDS}/liveness.py", "LivenessGuard._look"): Wait("twice in a run, for masters in host memory", within=True),
    (f"{_GUARDS}/nonfinite.py", "Locator.locate"): Wait("a step that was not finite is computed again", within=True),
    ("engine/layers/rounding.py", "RoundingReport.error"): Wait("once, what rounding did in the first step"),
    ("engine/experts/router_load.py", "RouterLoad.take_rows"): Wait("with a checkpoint"),
    (f"{_TRAINING}/evaluate.py", "evaluate"): Wait("the means of an evaluation"),
    (f"{_TRAINING}/state.py", "state_contents"): Wait("a save's counters", within=True),
    (f"{_TRAINING}/state.py", "state_tensors"): Wait("a save finds masters in host memory as they are", within=True),
    ("engine/checkpoint/run/snapshot.py", "Snapshot.take"): Wait("a save's copy", within=True),
    ("engine/experts/ops/expert_exchange.py", "plan_exchange"): Wait("NCCL takes the number of rows from the host"),
    ("engine/rollouts/source.py", "RolloutSource._filled"): Wait("between two steps, for the clock"),
    ("engine/rollouts/trained_sampler.py", "TrainedSampler.sample"): Wait("completions go to all ranks"),
}
