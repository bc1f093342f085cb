"""The decoder once more, in the plainest torch there is: whole matrices in a dict, autograd for every gradient.

Independent of the engine's ops, layers and sharding on purpose; what it shares is the Philox mask, which has known
answers of its own. Attention is one masked softmax over all tokens instead of one call per document.

Legend: T tokens, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import Batch
from engine.kernels.philox import dropout_mask
from engine.kernels.records import DropoutKey
from engine.models.decoder_config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class PlainDecoder:
    """Token losses as a function of `parameters`.

    Args:
        config: default rotary frequencies only.
        parameters: whole tensors under the engine's names; adapters are used where they are present.
        scale: of every adapter.
        dropout, seed: of the adapters' inputs.
    """

    config: DecoderConfig
    parameters: dict[str, Tensor]
    scale: float
    dropout: float
    seed: int

    def _low_rank(self, x: Tensor, name: str, batch: Batch, step: int, site: int) -> Tensor | float:
        a, b = (self.parameters.get(f"{name}.lora_{leaf}") for leaf in "AB")
        if a is None or b is None:
            return 0.0
        if self.dropout > 0:
            kept = dropout_mask(
                DropoutKey(
                    token_index=batch.token_index_BS.flatten(),
                    feature_offset=0,
                    num_features=x.shape[1],
                    probability=self.dropout,
                    seed=self.seed,
                    site=site,
                    step=step,
                )
            )
            x = x * kept / (1.0 - round(self.dropout * 65536) / 65536)
        return self.scale * ((x @ a.T) @ b.T)

    def _linear(self, x: Tensor, name: str, batch: Batch, step: int, site: int) -> Tensor:
        y = x @ self.parameters[f"{name}.weight"].T
        bias = self.parameters.get(f"{name}.bias")
        if bias is not None:
            y = y + bias
        return y + self._low_rank(x, name, batch, step, site)

    def _linears(
        self, x: Tensor, prefix: str, names: Sequence[str], fused: str, batch: Batch, step: int, site: int
    ) -> list[Tensor]:
        """Linears on one input, with an adapter each or one that stands over all of them."""
        outputs = [self._linear(x, f"{prefix}.{name}", batch, step, site) for name in names]
        together = self._low_rank(x, f"{prefix}.{fused}", batch, step, site)
        if isinstance(together, Tensor):
            parts = together.split([output.shape[1] for output in outputs], dim=1)
            outputs = [output + part for output, part in zip(outputs, parts, strict=True)]
        return outputs

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = (wide * wide).mean(-1, keepdim=True)
        normed = wide / torch.sqrt(mean_square + self.config.norm_eps)
        return normed.to(x.dtype) * self.parameters[f"{name}.weight"]

    def _rotate(self, x_THD: Tensor, positions: Tensor) -> Tensor:
        dim = self.config.head_dim
        frequencies = self.config.ropes[0].theta ** (-torch.arange(0, dim, 2).double() / dim)
        turns = torch.polar(torch.ones(()).double(), positions.double()[:, None, None] * frequencies)
        pairs = torch.complex(*x_THD.double().chunk(2, dim=-1)) * turns
        return torch.cat((pairs.real, pairs.imag), dim=-1).to(x_THD.dtype)

    def _attention(self, x: Tensor, prefix: str, batch: Batch, step: int, site: int) -> Tensor:
        config = self.config
        q, k, v = self._linears(x, prefix, ("q_proj", "k_proj", "v_proj"), "qkv_proj", batch, step, site)
        q, k, v = (part.unflatten(1, (-1, config.head_dim)) for part in (q, k, v))
        if config.qk_norm:
            q, k = self._norm(q, f"{prefix}.q_norm"), self._norm(k, f"{prefix}.k_norm")
        positions = batch.positions_BS.flatten()
        q, k = self._rotate(q, positions), self._rotate(k, positions)
        copies = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        scores = torch.einsum("thd,shd->hts", q, k) * config.head_dim**-0.5
        tokens = torch.arange(x.shape[0])
        document = torch.bucketize(tokens, batch.document_offsets[1:].long(), right=True)
        seen = (document[:, None] == document[None, :]) & (tokens[:, None] >= tokens[None, :])
        wide = scores.to(torch.promote_types(x.dtype, torch.float32))
        weights = wide.masked_fill(~seen, float("-inf")).softmax(-1).to(x.dtype)
        out = torch.einsum("hts,shd->thd", weights, v).flatten(1)
        return self._linear(out, f"{prefix}.o_proj", batch, step, site + 1)

    def _mlp(self, x: Tensor, prefix: str, batch: Batch, step: int, site: int) -> Tensor:
        gate, up = self._linears(x, prefix, ("gate_proj", "up_proj"), "gate_up_proj", batch, step, site)
        return self._linear(gate * torch.sigmoid(gate) * up, f"{prefix}.down_proj", batch, step, site + 1)

    def logits(self, batch: Batch, step: int) -> Tensor:
        """[T, vocabulary]."""
        ids = batch.tokens_BS.flatten()
        embedding = self.parameters["embed_tokens.weight"]
        x = embedding[ids]
        a, b = (self.parameters.get(f"embed_tokens.lora_{leaf}") for leaf in "AB")
        if a is not None and b is not None:
            x = x + self.scale * (a.T[ids] @ b.T)
        for index in range(self.config.num_layers):
            prefix, site = f"layers.{index}", 4 * index
            normed = self._norm(x, f"{prefix}.input_norm")
            x = x + self._attention(normed, f"{prefix}.attention", batch, step, site)
            normed = self._norm(x, f"{prefix}.post_attention_norm")
            x = x + self._mlp(normed, f"{prefix}.mlp", batch, step, site + 2)
        x = self._norm(x, "norm")
        head = embedding if self.config.tied_embeddings else self.parameters["lm_head.weight"]
        return x @ head.T + self._low_rank(x, "lm_head", batch, step, 4 * self.config.num_layers)

    def token_losses(self, batch: Batch, step: int) -> Tensor:
        """[T] negative log-likelihoods; 0 where there is no label."""
        labels, logits = batch.labels_BS.flatten(), self.logits(batch, step)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.nn.functional.cross_entropy(wide, labels, reduction="none", ignore_index=-100)
