"""One process against stock transformers and PEFT: logits, losses, gradients; documents of a pack run alone there."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.batch import Batch, Embeddings
from tests.distributed.cases import Case, build, make_batch, relative_error
from tests.distributed.gradient_table import EVERY_LINEAR
from tests.distributed.stock_models import (
    STOCK_MODELS,
    decoder_config,
    documents,
    stock_model,
    stock_parameter,
    stock_token_losses,
    with_adapters,
)

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"]
# two factors of one tied matrix are one matter to PEFT and two here, so there only the block carries adapters
TIED_TARGETS = TARGETS[:-2]


def _batch() -> Batch:
    return make_batch(
        [(0, (9, 1, 30)), (1, (40,)), (2, (5, 5, 21))], row_length=40, seq_length=40, vocab_size=131, seed=2
    )


def _cases(name: str) -> dict[str, Case]:
    config = decoder_config(name)
    adapters = rf".*\.({'|'.join(TIED_TARGETS)})" if config.tied_embeddings else EVERY_LINEAR
    return {
        "adapters": Case(config=config, adapters=adapters, dropout=0.0),
        "everything": Case(config=config, trained=".*"),
    }


@functools.cache
def _both(name: str, what: str) -> tuple[Tensor, dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """Token losses and gradients of the engine, then of the stock model."""
    case, batch = _cases(name)[what], _batch()
    built = build(case)
    losses = built.model(batch, built.stage.step)
    (losses * batch.loss_weights_BS.flatten()).sum().backward()
    model = stock_model(name, case)
    if what == "adapters":
        model = with_adapters(model, case, TIED_TARGETS if case.config.tied_embeddings else TARGETS)
    expected = stock_token_losses(model, batch)
    expected.sum().backward()
    gradients = {key: stock_parameter(model, key).grad for key in built.gradients()}
    return losses.detach(), built.gradients(), expected.detach(), gradients


every_model = pytest.mark.parametrize("name", STOCK_MODELS)
either = pytest.mark.parametrize("what", ["adapters", "everything"])


@every_model
@either
def test_token_losses(name: str, what: str):
    losses, _, expected, _ = _both(name, what)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)


@every_model
@either
def test_gradients(name: str, what: str):
    _, gradients, _, expected = _both(name, what)
    errors = {key: relative_error(gradients[key], expected[key]) for key in gradients}
    assert max(errors.values()) < 1e-5, {key: error for key, error in errors.items() if error >= 1e-5}


@every_model
def test_logits(name: str):
    case, batch = _cases(name)["everything"], _batch()
    built, model = build(case), stock_model(name, case)
    with torch.no_grad():
        context = built.model.context(batch, built.stage.step, training=False)
        logits = built.model.logits(built.model.run_layers(built.model.embed(batch), context), context)
        expected = torch.cat([model(input_ids=tokens[None]).logits[0] for tokens, _ in documents(batch)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


@every_model
def test_every_stock_parameter_is_trained(name: str):
    case = _cases(name)["everything"]
    model = stock_model(name, case)
    trained = {id(stock_parameter(model, key)) for key in build(case).gradients()}
    assert trained == {id(parameter) for parameter in model.parameters()}


def test_explicit_embeddings_and_positions_replace_the_lookup():
    """As a vision model would: the embedding's own output, handed in, gives the same losses."""
    built, batch = build(_cases("grouped heads")["everything"]), _batch()
    with torch.no_grad():
        expected = built.model(batch, built.stage.step)
        handed = replace(batch, tokens_BS=torch.zeros_like(batch.tokens_BS))
        handed = handed.with_parts(Embeddings(embeddings_TH=built.model.embed(batch)))
        assert torch.equal(built.model(handed, built.stage.step), expected)
        shifted = replace(batch, positions_BS=batch.positions_BS + 7)
        # rotary embeddings are relative, so a common shift changes rounding only
        torch.testing.assert_close(built.model(shifted, built.stage.step), expected, rtol=0, atol=2e-5)
        stretched = replace(batch, positions_BS=batch.positions_BS * 3)
        assert not torch.allclose(built.model(stretched, built.stage.step), expected, atol=1e-3)
