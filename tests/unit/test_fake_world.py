"""One rank of eight alone in this process: it builds and takes a step, and holds the bytes that arithmetic says.

The arithmetic here is done by hand from the sizes of the model, and for the whole model by transformers.
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config.load import parse_config
from engine.config.run import RunConfig
from engine.layers.module import ShardEntry
from engine.training.build import Training
from tests.support.fake_training import build_rank, rank_batches
from tests.support.fake_world import fake_world
from tests.support.sweeps import sampled

WORLD = 8
ADAPTER = 16
ALIGNED = 32
"""Elements to a multiple of which each parameter is padded in the flat buffers."""
NUM_BUFFERS = 4
"""Gradient, master, and AdamW's two moments."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a model with the proportions of a 70B Llama, 1/32 as wide."""

    layers: int
    hidden: int = 256
    intermediate: int = 896
    heads: int = 64
    kv_heads: int = 8
    vocab: int = 4001

    def write(self, folder: Path) -> Path:
        config = {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": self.hidden,
            "intermediate_size": self.intermediate, "num_hidden_layers": self.layers, "vocab_size": self.vocab,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "rms_norm_eps": 1e-5,
            "rope_theta": 5e5, "tie_word_embeddings": False,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def linears(self, tp: int) -> list[tuple[list[int], int]]:
        """Returns, for one layer and tensor rank, the rows of linears that share an input, and its width."""
        query, key = self.heads * self.head_dim // tp, self.kv_heads * self.head_dim // tp
        inner = self.intermediate // tp
        return [
            ([query, key, key], self.hidden), ([self.hidden], query), ([inner, inner], self.hidden),
            ([self.hidden], inner),
        ]  # fmt: skip

    def weights(self, tp: int, layers: int, *, embedding: bool, head: bool) -> int:
        """Elements of a rank's parameters: [W | B] in one storage with a block of columns for each B, A, and norms."""
        layer = 2 * self.hidden
        for rows, width in self.linears(tp):
            adapters = ADAPTER * len(rows)
            layer += sum(rows) * (width + adapters) + adapters * width
        vocabulary = -(-self.vocab // tp) * self.hidden
        return layers * layer + embedding * vocabulary + head * (vocabulary + self.hidden)

    def flat(self, tp: int, layers: int) -> int:
        """Elements of each flat buffer: every A and B."""
        shapes = [size for rows, width in self.linears(tp) for row in rows for size in (ADAPTER * width, ADAPTER * row)]
        return layers * sum(-(-size // ALIGNED) * ALIGNED for size in shapes)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank of a layout, and what it should hold.

    Args:
        layers, held: of the model, and on this rank.
        tp: tensor ranks.
        embedding, head: whether this rank has them.
    """

    options: str
    rank: int
    layers: int
    held: int
    tp: int = 1
    embedding: bool = True
    head: bool = True


TENSOR = "--parallel.tensor 8"
PIPELINE = "--parallel.pipeline 8 --parallel.layers_per_stage [11,10,10,10,10,10,10,9]"
CONTEXT = "--parallel.context 8"
BOTH = "--parallel.tensor 4 --parallel.pipeline 2 --parallel.layers_per_stage [5,3]"

PLACES = {
    "tensor 8, first": Place(options=TENSOR, rank=0, layers=8, held=8, tp=8),
    "tensor 8, last": Place(options=TENSOR, rank=7, layers=8, held=8, tp=8),
    "tensor 8 without sequence": Place(
        options=f"{TENSOR} --parallel.sequence false --parallel.lora_reduce joint", rank=3, layers=4, held=4, tp=8
    ),
    "pipeline 8, first": Place(options=PIPELINE, rank=0, layers=80, held=11, head=False),
    "pipeline 8, between": Place(options=PIPELINE, rank=4, layers=80, held=10, embedding=False, head=False),
    "pipeline 8, last": Place(options=PIPELINE, rank=7, layers=80, held=9, embedding=False),
    "context 8, ring": Place(options=CONTEXT, rank=5, layers=4, held=4),
    "context 8, ulysses": Place(options=f"{CONTEXT} --parallel.context_method ulysses", rank=2, layers=4, held=4),
    "tensor 4, pipeline 2": Place(options=BOTH, rank=6, layers=8, held=3, tp=4, embedding=False),
}
QUICK = ("tensor 8, last", "pipeline 8, between")


def _config(folder: Path, sizes: Sizes, options: str) -> RunConfig:
    return parse_config(
        [
            "--model.path", str(sizes.write(folder)), "--model.init", "random", "--lora.rank", str(ADAPTER),
            "--data.seq_length", "64", "--train.global_batch_size", "8", "--optim.backend", "torch",
            "--model.kernels", "reference", *options.split(),  # which fold every adapter
        ]
    )  # fmt: skip


def _live_bytes() -> int:
    """Returns the bytes of all live tensors, each storage once."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _storage_bytes(entries: list[ShardEntry]) -> int:
    storages = [entry.parameter.untyped_storage() for entry in entries]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _flat_buffers(training: Training) -> tuple[Tensor, ...]:
    optimizer = training.optimizer
    return optimizer.flat.gradient, optimizer.flat.master, optimizer.exp_avg, optimizer.exp_avg_sq


@pytest.mark.parametrize("name", sampled(PLACES, QUICK))
def test_rank_holds_what_arithmetic_says_and_takes_a_step(name: str, tmp_path: Path) -> None:
    place = PLACES[name]
    sizes = Sizes(layers=place.layers)
    config = _config(tmp_path, sizes, place.options)
    before = _live_bytes()
    with fake_world(place.rank, WORLD):
        training = build_rank(config, place.rank, WORLD)
        entries = training.stages.entries()
        for entry in entries:
            assert tuple(entry.parameter.shape) == entry.spec.local_shape
        weights = 4 * sizes.weights(place.tp, place.held, embedding=place.embedding, head=place.head)
        flat = 4 * sizes.flat(place.tp, place.held)
        assert _storage_bytes(entries) == weights
        assert [buffer.nbytes for buffer in _flat_buffers(training)] == [flat] * NUM_BUFFERS

        # beside them there are only tables and counters; some of an earlier test's may go meanwhile
        built = _live_bytes() - before
        assert -(2**12) <= built - (weights + NUM_BUFFERS * flat) < 2**17, built
        batches, targets = rank_batches(config, training)
        result = training.step(batches, targets, 1e-3)
        assert result.loss.shape == result.grad_norm.shape == ()
        del batches, result  # the stages keep the last step's micro-batches, some tens of KiB
        assert _live_bytes() - before < built + 2**17, "a step leaves something behind"


def _owned_elements(entry: ShardEntry) -> int:
    """Returns the number of the whole tensor's elements that this rank owns."""
    spec = entry.spec
    if not spec.owner:
        return 0
    length = entry.parameter.shape[spec.dim] if spec.dim is not None else 1
    held = sum(piece.length for piece in spec.pieces) if spec.dim is not None else 1
    return entry.parameter.numel() // length * held


def test_ranks_hold_the_model_once(tmp_path: Path) -> None:
    """All eight, one after the other; the whole is what transformers counts, and the adapters' factors."""
    sizes = Sizes(layers=4)
    config = _config(tmp_path, sizes, "--parallel.tensor 4 --parallel.pipeline 2")
    frozen = adapters = 0
    for rank in range(WORLD):
        with fake_world(rank, WORLD):
            for entry in build_rank(config, rank, WORLD).stages.entries():
                if entry.sink is None:
                    frozen += _owned_elements(entry)
                else:
                    adapters += _owned_elements(entry)
    with torch.device("meta"):
        stock = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path))
    assert frozen == sum(parameter.numel() for parameter in stock.parameters())
    linears = [module for module in stock.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    assert adapters == sum(ADAPTER * (linear.in_features + linear.out_features) for linear in linears)


def test_the_process_is_in_no_world_afterwards() -> None:
    with pytest.raises(ZeroDivisionError), fake_world(3, 5):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 5)
        raise ZeroDivisionError
    assert not dist.is_initialized()
