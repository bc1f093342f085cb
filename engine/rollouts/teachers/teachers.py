"""The teachers of a run: checked before weights are read, built beside the model, asked for each generation batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.model_folder import ModelFolder
from engine.config.distillation import BASE, is_server
from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.data.tokenizer import Tokenizer
from engine.distillation.teacher_model import build_teacher, check_teacher, open_teacher, teacher_identity
from engine.distillation.teacher_states import TeacherPasses
from engine.distributed.collectives import broadcast_object
from engine.errors import UserError
from engine.rollouts.data.prompts import Prompt
from engine.rollouts.teachers.served import ServedTeacher, TeacherServer
from engine.rollouts.token_logps import token_logps
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.training.build import Training
from engine.training.rank_stages import Stages

_COMPARED = 16
"""Prompts whose text is given to the tokenizers of teachers."""


class Teachers:
    """The teachers of a run, in the order of distillation.teachers. Collective: every rank makes the same calls.

    With distillation.whole they pass over the rows of each step, and are asked for no log-probabilities.

    Args:
        config, launch, training: of the run, whose mesh they share.
    """

    def __init__(self, config: RunConfig, launch: Launch, training: Training) -> None:
        self._config, self._training = config, training
        log, found, built = Log(launch.rank), list[str | None](), list[Stages]()
        self._served: list[ServedTeacher] = []
        self._ask: list[Callable[[TokenDataset], NDArray[np.float32]]] = []
        for teacher in config.distillation.teachers:
            if teacher == BASE:
                self._ask.append(self._of_base)
                found.append(None)
            elif is_server(teacher):
                self._served.append(ServedTeacher(config, launch, teacher))
                self._ask.append(self._served[-1].logps)
                found.append(self._served[-1].identity())
            else:
                opened = open_teacher(config, Path(teacher), launch.world_size, log)
                stages = build_teacher(opened, launch, training, log)
                self._ask.append(partial(token_logps, config, training.mesh, stages))
                found.append(teacher_identity(opened) if launch.rank == 0 else None)
                built.append(stages)
        if config.distillation.whole:
            training.stages.prepare = TeacherPasses(built, training.stages.models()[-1].config.vocab_size).taught
        self.identities = cast(list[str | None], broadcast_object(found))
        """Hashes that tell one content of each teacher from another; None where there is no content of its own, or none
        is known."""

    def logps(self, dataset: TokenDataset) -> NDArray[np.float32]:
        """Returns float32 [K, T], the log-probability of each token of a data set under each teacher, at the rollouts'
        temperature; arbitrary where it is no target.

        Raises:
            UserError: a server fails; on all ranks.
        """
        return np.stack([ask(dataset) for ask in self._ask])

    def close(self) -> None:
        """Ends calls under way."""
        for one in self._served:
            one.close()

    def _of_base(self, dataset: TokenDataset) -> NDArray[np.float32]:
        return token_logps(self._config, self._training.mesh, self._training.stages, dataset, adapters=False)


def check_teachers(
    config: RunConfig,
    launch: Launch,
    model: ModelFolder,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    say: Callable[[str], None],
) -> None:
    """Checks that the teachers of a run can judge its tokens. Collective.

    Args:
        model, tokenizer: that are trained.
        prompts: of the run.
        say: prints a line on rank 0.

    Raises:
        UserError: a teacher that cannot be opened, does not fit the layout, or has other tokens; on all ranks.
    """
    for name, teacher in zip(config.distillation.names, config.distillation.teachers, strict=True):
        if teacher == BASE:
            say("teacher base: the model without its adapters")
            continue
        if is_server(teacher):
            note, problem = _server_problem(config, teacher, tokenizer, prompts) if launch.rank == 0 else (None, None)
            if (told := broadcast_object(problem)) is not None:
                raise UserError(str(told))
            say(f"teacher {name}: a server{'' if note is None else f'; {note}'}")
            continue
        texts = _texts(tokenizer, prompts) if launch.rank == 0 else []
        check_teacher(config, launch, name, teacher, model=model, tokenizer=tokenizer, texts=texts, say=say)


def _texts(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[str]:
    """Returns the texts that tokenizers are compared with."""
    return [tokenizer.decode(prompt.ids) for prompt in prompts[:_COMPARED]]


def _server_problem(
    config: RunConfig, url: str, tokenizer: Tokenizer, prompts: Sequence[Prompt]
) -> tuple[str | None, str | None]:
    """Returns a note on a server, and the reason why it cannot teach; None where there is none."""
    server = TeacherServer(config, url)
    try:
        return server.check(tokenizer, _texts(tokenizer, prompts), prompts[0].ids), None
    except UserError as error:
        return None, str(error)
    finally:
        server.close()
