"""The counts of rows that ranks with experts tell each other, which no tensor without numbers has.

Every expert gets equally many of this rank's rows. From other ranks come more than it sends, so that rows sent and rows
that arrive cannot be taken for each other; or none, as where other experts are chosen alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.experts.ops import routing
from tests.fake_cuda.recorder import Recorder

_PLACE = ("engine/experts/ops/expert_exchange.py", "plan_exchange")


def install(recorder: Recorder, *, rows_arrive: bool) -> None:
    """Puts the counts in the place of what the host reads.

    Args:
        rows_arrive: whether other tokens have chosen this rank's experts.
    """
    modules: Any = routing
    plain, routed = modules.row_groups, [0]

    def noted(sorted_ids_N: Tensor, num_experts: int, *, loops: bool) -> Any:
        routed[0] = sorted_ids_N.shape[0]
        return plain(sorted_ids_N, num_experts, loops=loops)

    def counts(tensor: Tensor) -> Any:
        _, ranks, here = tensor.shape
        each, more = divmod(routed[0], ranks * here)
        sent = [[each] * here for _ in range(ranks)]
        sent[0][0] += more
        received = [[(each + 3) if rows_arrive else 0] * here for _ in range(ranks)]
        return [sent, received]

    modules.row_groups = noted
    recorder.numbers[_PLACE] = counts
