"""How many rows ranks send each other for their experts, where no router has chosen: on the meta device.

Two cases bound what a rank may have to hold, since no token is dropped. With "balanced" routing every expert gets as
many of a rank's rows as any other. With the "worst", the tokens of all ranks choose the same experts, the first of the
first rank, so that this one gets all rows; or, of a rank with fewer experts than a token has, as many of each token as
it has experts. Routers of pretrained models are much nearer to the first.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Literal

from engine.distributed.mesh import Counts, ExpertRows

Routing = Literal["balanced", "worst"]


def expert_rows(routing: Routing, *, per_token: int, ranks: int) -> ExpertRows:
    """Returns the rows that the first of `ranks` ranks sends and receives.

    Args:
        routing: how tokens choose.
        per_token: experts of a token.
        ranks: which divide the experts evenly, and have as many tokens each.
    """
    return partial(_rows, routing, per_token, ranks)


def _rows(routing: Routing, per_token: int, ranks: int, num_rows: int, num_experts: int) -> tuple[Counts, Counts]:
    if routing == "balanced":
        ends = [num_rows * expert // num_experts for expert in range(num_experts + 1)]
        counts = [end - start for start, end in pairwise(ends)]
    else:
        counts = [num_rows // per_token] * per_token + [0] * (num_experts - per_token)
    here = num_experts // ranks
    sent = [counts[first : first + here] for first in range(0, num_experts, here)]
    return sent, [counts[:here]] * ranks
