"""Two sets of weights for one place in a layer, one for the tokens of images and one for those of text (CogVLM).

Each set is a linear, or an MLP of linears, on its own tokens packed by index (see `engine.vision.ops.token_experts`):
with its own adapters, folded or not, frozen or trained. An adapter's dropout has the coordinates of the tokens in the
batch, so a mask is the same however tokens are packed; both sets have one dropout site, because no token meets both.

Both are built with `deferred_sums`, under which they leave sums over tensor ranks, of a column linear's input gradient
and of a row linear's output, to the boundary with the residual stream. The norm whose output they read is built with it
too: its weight's gradient is then a partial sum.
"""

from __future__ import annotations

from torch import Tensor, nn

from engine.distributed.mesh import Axis
from engine.layers.bypass import bypassed
from engine.layers.context import TensorLayout
from engine.ops.attention.token_context import PackedTokens, TokenContext
from engine.ops.inputs import LinearInput
from engine.vision.ops.token_experts import join_experts, split_by_expert

VISION_EXPERT = "vision"
"""Last component of the prefix of the vision expert's modules: `layers.3.attention.vision.q_proj`."""


class ExpertPair(nn.Module):
    """Two modules in the place of one, with the signature of a linear.

    Args:
        language, vision: linears or MLPs, (u, source, context) -> [tokens, width].
        width: features of their outputs.
        layout: of the residual stream.
        from_stream: the input is the residual stream, or what is made from it.
        to_stream: the output is added to the residual stream.
    """

    def __init__(
        self,
        language: nn.Module,
        vision: nn.Module,
        *,
        width: int,
        layout: TensorLayout,
        from_stream: bool,
        to_stream: bool,
    ) -> None:
        super().__init__()
        self.language, self.vision, self._width = language, vision, width
        alone = Axis(layout.tp.name)
        self._in = layout.tp if from_stream else alone
        self._out = layout.tp if to_stream else alone
        self._splits_tokens = layout.splits_tokens

    def forward(self, u: Tensor, source: LinearInput, context: TokenContext) -> Tensor:
        experts = context.experts
        assert experts is not None
        packed = split_by_expert(u, experts, self._in, splits_tokens=self._splits_tokens)
        language = self._run(self.language, packed[0], source, context, experts.language)
        vision = self._run(self.vision, packed[1], source, context, experts.vision)
        return join_experts((language, vision), experts, self._out, splits_tokens=self._splits_tokens)

    def _run(
        self, module: nn.Module, u: Tensor, source: LinearInput, context: TokenContext, tokens: PackedTokens
    ) -> Tensor:
        if tokens.count:
            return module(u, source, context.of_tokens(tokens))
        return bypassed(u.new_empty(0, self._width), module, source)
