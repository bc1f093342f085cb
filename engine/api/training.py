"""Training from a Python program."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from engine.api.given import Data, Environment, Given, Reward, Tool, names_of
from engine.api.interrupts import briefly_interrupted
from engine.api.process import training_alone
from engine.config.rules import check_config, check_files
from engine.config.run import RunConfig
from engine.config.snapshots import with_snapshots
from engine.telemetry.format import short_path
from engine.telemetry.listener import RunListener
from engine.training import trainer
from engine.training.reports.summary import RunSummary


@briefly_interrupted
def train(
    config: RunConfig,
    listener: RunListener | None = None,
    *,
    data: Data | None = None,
    mix: Sequence[tuple[Data, float]] | None = None,
    validation: Data | None = None,
    rewards: Sequence[Reward | tuple[Reward, float]] | None = None,
    tools: Sequence[Tool] | None = None,
    environment_factory: Environment | None = None,
) -> RunSummary:
    """Trains as configured, in this process, or as one rank where torchrun started it.

    In the main thread it answers signals: Ctrl-C, SIGTERM and SIGUSR1 stop the run after the step under way and save
    it. In another thread it leaves them alone; `RunListener.stop` stops the run there, as anywhere.

    Records that are given here are read once, to their end, and give the rows of the same records in a JSONL file. The
    saved run knows their rows by a hash alone: to resume it, give them again, and a difference is reported. Under
    torchrun every rank gives the same arguments; rank 0 alone calls `rewards`, and the first rank of each copy of
    the model `tools` and environments.

    Args:
        config: of `load_config`.
        listener: hears of steps, evaluations, checkpoints and the end, and may stop the run.
        data: training samples, in place of data.train: a list, an iterator or a `datasets.Dataset` of mappings with the
            fields that a file's records have, a function without arguments that returns one of these, or the path of a
            file. An iterator without a length may give 1,000,000 records. Images are paths, relative to the current
            folder or data.image_folder, or Pillow's.
        mix: further training samples with their weights, in place of data.mix.
        validation: samples for evaluation, in place of data.validation.
        rewards: what scores completions, in place of rollout.rewards: functions that are called as TRL calls them, in a
            thread of this process, or entries of rollout.rewards; each alone, or in a pair with its weight.

        tools: functions that the model may call while it answers, in place of rollout.tools: called in a thread of this
            process, or entries of rollout.tools.
        environment_factory: makes the environment of a conversation, as in TRL, in place of rollout.environment: a
            class, or an entry such as env.py:Door. Where `tools` has functions, this is a class, and the other way
            round.

    Returns:
        The results of the run. `run_dir` is its folder; `stopped` says what stopped it, such as "stop()" or a
        scheduler's signal, None at its end.

    Raises:
        KeyboardInterrupt: Ctrl-C; where steps had been taken, after the run was saved.
        UserError: something in the configuration, the model or the data cannot work, or another rank is lost. With one
            process the next call starts afresh; as a rank of several, let the process end.
    """
    given = Given(
        data=data,
        mix=mix,
        validation=validation,
        rewards=rewards,
        tools=tools,
        environment_factory=environment_factory,
    )
    with training_alone(), ExitStack() as opened:
        config, supplied = given.put_into(config, opened)
        check_config(config)
        config = with_snapshots(config)  # for data that is named here
        check_files(config, names_of(supplied))
        summary = trainer.train(config, listener, supplied=supplied)
    if summary.interrupted:
        raise KeyboardInterrupt(f"stopped after step {summary.steps} of the run in {short_path(summary.run_dir)}")
    return summary
