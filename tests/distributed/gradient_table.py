"""Which gradients are still partial sums after backward, row by row, written down apart from the code under test.

A row names a case, the parameters it speaks of, and what must be true of their local gradients before any reduction:

    complete   the local gradient is already the whole one's slice
    tp         only the sum over the tensor-parallel ranks is, and no rank's own part is
    replica    only the sum over the ranks that hold the same key/value head is, and no rank's own part is
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tests.distributed.cases import Case, small_config

Kind = Literal["complete", "tp", "replica"]

BLOCK = r"layers\.\d+\.(attention\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
EVERY_LINEAR = rf"{BLOCK}|lm_head|embed_tokens"
FUSED = {"adapters": r"layers\..*_proj", "fused": r"layers\..*\.(qkv|gate_up)_proj"}
NORMS = r".*norm"

_PLAIN = small_config()
_BIASED = small_config(qkv_bias=True, out_bias=True, mlp_bias=True)
_QK_NORM = small_config(qk_norm=True)
_TIED = small_config(tied_embeddings=True)
_ONE_KV = small_config(num_kv_heads=1, qkv_bias=True)
_ALL = small_config(qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)

CASES: dict[str, Case] = {
    "adapters local": Case(config=_PLAIN, adapters=EVERY_LINEAR),
    "adapters joint": Case(config=_PLAIN, adapters=EVERY_LINEAR, joint=True),
    "adapters sequence": Case(config=_PLAIN, adapters=EVERY_LINEAR, sequence_parallel=True),
    "adapters sequence joint": Case(config=_PLAIN, adapters=EVERY_LINEAR, sequence_parallel=True, joint=True),
    "fused local": Case(config=_PLAIN, **FUSED),
    "fused joint": Case(config=_PLAIN, **FUSED, joint=True),
    "fused sequence": Case(config=_PLAIN, **FUSED, sequence_parallel=True),
    "unfolded local": Case(config=_PLAIN, adapters=EVERY_LINEAR, fold=False),
    "unfolded joint": Case(config=_BIASED, adapters=EVERY_LINEAR, joint=True, fold=False),
    "unfolded sequence": Case(config=_PLAIN, adapters=EVERY_LINEAR, sequence_parallel=True, fold=False),
    "unfolded fused sequence": Case(config=_PLAIN, **FUSED, sequence_parallel=True, fold=False),
    "norms": Case(config=_QK_NORM, adapters=BLOCK, trained=NORMS),
    "norms joint": Case(config=_QK_NORM, adapters=BLOCK, trained=NORMS, joint=True),
    "norms sequence": Case(config=_QK_NORM, adapters=BLOCK, trained=NORMS, sequence_parallel=True),
    "head trained": Case(config=_BIASED, adapters=BLOCK, trained="lm_head"),
    "head trained sequence": Case(config=_BIASED, adapters=BLOCK, trained="lm_head", sequence_parallel=True),
    "tied head adapter": Case(config=_TIED, adapters="lm_head|embed_tokens"),
    "tied head adapter sequence": Case(config=_TIED, adapters="lm_head|embed_tokens", sequence_parallel=True),
    "tied trained": Case(config=_TIED, adapters=BLOCK, trained="embed_tokens"),
    "tied trained sequence": Case(config=_TIED, adapters=BLOCK, trained="lm_head", sequence_parallel=True),
    "everything": Case(config=_ALL, trained=".*"),
    "everything sequence": Case(config=_ALL, trained=".*", sequence_parallel=True),
    "everything tied": Case(config=_TIED, trained=".*"),
    "one kv head": Case(config=_ONE_KV, adapters=r".*\.[kv]_proj"),
    "one kv head trained, sequence": Case(config=_ONE_KV, trained=r".*\.[kvo]_proj", sequence_parallel=True),
    "some trained, some adapted": Case(
        config=_BIASED,
        adapters=r"layers\.\d+\.(attention\.[kvo]_proj|mlp\.up_proj)",
        trained=r"layers\.\d+\.(attention\.q_proj|mlp\.(gate|down)_proj)",
        joint=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Args:
        title: as the table in engine/ops/parallel_linear.py and its neighbours word it.
        pattern: matched whole against a parameter's name without its layer prefix.
        kind: see above.
        cases: pattern over the names of the cases it holds for.
        replicated_kv: True or False where the row holds only with or only without fewer key/value heads than ranks.
    """

    title: str
    pattern: str
    kind: Kind
    cases: str
    replicated_kv: bool | None = None

    def covers(self, parameter: str) -> bool:
        short = re.sub(r"^layers\.\d+\.(attention\.|mlp\.)?", "", parameter)
        return re.fullmatch(self.pattern, short) is not None


_COLUMN_A = r"((q|k|v|qkv|gate|up|gate_up)_proj|lm_head)\.lora_A"
_LOCAL = r"(?!.*(joint|sequence|some)).*"
_JOINT = r"(?!.*sequence).*(joint|some).*"
_SEQUENCE = r".*sequence.*"
_NO_SEQUENCE = r"(?!.*sequence).*"

ROWS = (
    Row(title="column local, dA", pattern=_COLUMN_A, kind="tp", cases=_LOCAL),
    Row(title="column joint, dA", pattern=_COLUMN_A, kind="complete", cases=_JOINT),
    Row(title="column sequence, dA", pattern=_COLUMN_A, kind="tp", cases=_SEQUENCE),
    Row(title="column, dB", pattern=r"((q|qkv|gate|up|gate_up)_proj|lm_head)\.lora_B", kind="complete", cases=".*"),
    Row(title="row, dA", pattern=r"(o|down)_proj\.lora_A", kind="complete", cases=".*"),
    Row(title="row, dB", pattern=r"(o|down)_proj\.lora_B", kind="tp", cases=".*"),
    Row(title="k and v split, dB", pattern=r"[kv]_proj\.lora_B", kind="complete", cases=".*", replicated_kv=False),
    Row(title="k and v replicated, dB", pattern=r"[kv]_proj\.lora_B", kind="replica", cases=".*", replicated_kv=True),
    Row(
        title="k and v split, trained",
        pattern=r"[kv]_proj\.(weight|bias)",
        kind="complete",
        cases=".*",
        replicated_kv=False,
    ),
    Row(
        title="k and v replicated, trained",
        pattern=r"[kv]_proj\.(weight|bias)",
        kind="replica",
        cases=".*",
        replicated_kv=True,
    ),
    Row(
        title="column trained", pattern=r"(q|gate|up)_proj\.(weight|bias)|lm_head\.weight", kind="complete", cases=".*"
    ),
    Row(title="row trained", pattern=r"(o|down)_proj\.weight", kind="complete", cases=".*"),
    Row(title="row bias", pattern=r"(o|down)_proj\.bias", kind="complete", cases=_NO_SEQUENCE),
    Row(title="row bias, sequence", pattern=r"(o|down)_proj\.bias", kind="tp", cases=_SEQUENCE),
    Row(title="q_norm and k_norm", pattern=r"[qk]_norm\.weight", kind="tp", cases=".*"),
    Row(title="norms", pattern=r"(input_norm|post_attention_norm|norm)\.weight", kind="complete", cases=_NO_SEQUENCE),
    Row(title="norms, sequence", pattern=r"(input_norm|post_attention_norm|norm)\.weight", kind="tp", cases=_SEQUENCE),
    Row(title="embedding, dA", pattern=r"embed_tokens\.lora_A", kind="complete", cases=".*"),
    Row(title="embedding, dB", pattern=r"embed_tokens\.lora_B", kind="tp", cases=".*"),
    Row(title="embedding trained", pattern=r"embed_tokens\.weight", kind="complete", cases=".*"),
)


def rows_for(case: str, parameter: str, world: int) -> list[Row]:
    """The rows that speak of a parameter of a case on `world` tensor-parallel ranks; exactly one should."""
    replicated_kv = world > CASES[case].config.num_kv_heads
    return [
        row
        for row in ROWS
        if re.fullmatch(row.cases, case) and row.covers(parameter) and row.replicated_kv in (None, replicated_kv)
    ]
