"""The proof of `engine.rollouts.delivery` over a run: after each delivery, of each server by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.config.run import RunConfig
from engine.errors import UserError
from engine.rollouts.delivery import Known, Probe, delivery, fault, noise_of
from engine.rollouts.rank_zero import broadcast_result
from engine.rollouts.servers.several import CompletionServers
from engine.training.build import Training


class DeliveryCheck:
    """Asks the servers of a run what they compute with. Collective: every rank has one and makes the same calls.

    Args:
        config, training: of the run.
        prompts: of the run, as token ids.
        server: on rank 0; None on the others.
        say: prints a line on rank 0.
    """

    def __init__(
        self,
        config: RunConfig,
        training: Training,
        prompts: Sequence[Sequence[int]],
        server: CompletionServers | None,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._server, self._say = config, server, say
        self._probe = Probe(config, training, prompts)
        wanted = config.rollout.check_delivery and config.rollout.temperature == 1 and bool(self._probe.rows)
        self._asked = list(config.rollout.servers) if wanted else []
        """Addresses of the servers that give log-probabilities of prompts."""
        self._noise: dict[str, float | None] = {}
        self._without: NDArray[np.float32] | None = None
        self._now: NDArray[np.float32] | None = None
        """The trainer's log-probabilities of the probe without adapters, and under the adapter that was given last."""
        self.share: float | None = None
        """See `engine.rollouts.sampler.Sampler.delivery`."""

    def forget(self) -> None:
        """Forgets the adapter that the servers have: they were given one that the trainer no longer has."""
        self._now = None

    def check(self, adapter: str, step: int) -> None:
        """Proves that each server computes with an adapter that it was given. Collective.

        Args:
            adapter: its name.
            step: steps that it was trained for.

        Raises:
            UserError: one does not; on all ranks.
        """
        self.share = None
        if not self._asked:
            return
        if self._without is None:
            self._without = self._probe.logps(adapters=False)
            for url, served in zip(self._config.rollout.servers, self._served(None), strict=True):
                self._noise[url] = None if served is None else noise_of(served, self._without)
        known = Known(self._without, self._now, self._probe.logps())
        self._now = known.now
        faults = []
        lengths = [len(row) - 1 for row in self._probe.rows]
        for url, served in zip(self._config.rollout.servers, self._served(adapter), strict=True):
            if url not in self._asked:
                continue
            if served is None:
                self._say(
                    f"warning: step {step}: {url} gives no log-probabilities of prompts, so that nothing proves which "
                    "adapter it computes with; rollout.check_delivery is off for it from now on"
                )
                self._asked.remove(url)
                continue
            if (found := fault(served, known, noise=self._noise[url], rows=lengths)) is not None:
                faults.append(f"{url} was given the adapter of step {step} and {found}")
                continue
            place = delivery(served, known.old, known.now)
            if place.tells:
                self.share = place.share if self.share is None else min(place.share, self.share)
        if faults:
            raise UserError(f"{'; '.join(faults)}; or set rollout.check_delivery to false.")

    def _served(self, adapter: str | None) -> list[NDArray[np.float32] | None]:
        """Returns the log-probabilities of each server, which are all asked at once; None of one that gives none.
        Collective.

        Args:
            adapter: the name of one; None for the model without.
        """
        asked = None if self._server is None else self._server.ask_logps(adapter, self._probe.rows)
        answers: list[list[float] | None] = broadcast_result(asked, self._config)
        rows, found = len(self._probe.rows), list[NDArray[np.float32] | None]()
        for number in range(len(self._config.rollout.servers)):
            own = [one for one in answers[number * rows : (number + 1) * rows] if one is not None]
            found.append(np.concatenate(own).astype(np.float32) if len(own) == rows else None)
        return found
