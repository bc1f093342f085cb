"""Tasks that score a run's model while it trains: `evaluation.tasks`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from engine.checkpoint.tokenizer_files import TrainedTokenizer, end_tokens
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.models.decoder_config import DecoderConfig
from engine.training.build import Training
from engine.training.evaluations import TaskFigure
from rankfold.evaluating.choice import TaskChoice
from rankfold.evaluating.text_tokenizer import open_text_tokenizer

if TYPE_CHECKING:
    from rankfold.evaluating.tasks import Tasks


def load_tasks(config: RunConfig, decoder: DecoderConfig) -> Tasks:
    """Loads the tasks of a run.

    Args:
        config: of the run; `evaluation.tasks` names at least one.
        decoder: of its model.

    Raises:
        UserError: the harness is not installed, a task cannot be loaded, or the model reads images alone.
    """
    if find_spec("lm_eval") is None:
        raise UserError(
            "evaluation.tasks names tasks of lm-evaluation-harness, which is not installed: pip install 'lm-eval[hf]', "
            "or remove evaluation.tasks."
        )
    if decoder.needs_images:
        raise UserError(
            f"evaluation.tasks are texts, but every layer of this {decoder.family} model attends to an image: remove "
            "evaluation.tasks."
        )
    from rankfold.evaluating.tasks import Tasks

    options = config.evaluation
    return Tasks(
        TaskChoice(
            tasks=options.tasks,
            include_path=None if options.include_path is None else Path(options.include_path),
            limit=options.limit,
            num_fewshot=options.num_fewshot,
            apply_chat_template=options.apply_chat_template,
            allow_code=options.allow_code,
            download=config.hub.download,
        )
    )


class RunTasks:
    """Scores the model of a run; see `engine.training.evaluations.TaskEvaluation`.

    Args:
        config, training: of the run.
        tasks: loaded.
        tokenizer: that of the run, where it is not the model's own.

    Raises:
        UserError: transformers cannot open the tokenizer, or it has no chat template where one is needed.
    """

    def __init__(self, config: RunConfig, training: Training, tasks: Tasks, tokenizer: TrainedTokenizer) -> None:
        from rankfold.evaluating.language_model import EngineLM, PassSizes
        from rankfold.evaluating.model import EvaluatedModel

        self._tasks = tasks
        folder = training.source.model.path
        opened = open_text_tokenizer(tokenizer.path or folder, tokenizer.chat_template)
        if config.evaluation.apply_chat_template and opened.chat_template is None:
            raise UserError(
                "evaluation.apply_chat_template is true, but the tokenizer has no chat template: set "
                "data.chat_template, or evaluation.apply_chat_template to false."
            )
        self._model = EngineLM(
            EvaluatedModel.of_training(config, training),
            opened,
            folder=folder,
            end_ids=end_tokens(folder, opened.eos_token_id),
            template_arguments=config.data.chat_arguments,
            sizes=PassSizes(rows=config.evaluation.batch),
        )

    def run(self, check: Callable[[], None]) -> dict[str, TaskFigure]:
        from rankfold.evaluating.tasks import figures
        from rankfold.evaluating.watch import RunWatch

        self._model.watch = RunWatch(check)
        results = self._tasks.evaluate(self._model, errors=False)
        return {f"{task}/{metric}": TaskFigure(value, higher) for task, metric, value, higher in figures(results)}
