"""What an adapter and a model of each type are once exported: read by PEFT, and by transformers, bit for bit."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from engine.adopted.forms import seeded
from engine.adopted.proof import Small, proof_batch, reference
from engine.adopted.structure import FAULTS, first_line, quiet
from engine.batch import Batch
from engine.checkpoint.model_weights import open_source
from engine.checkpoint.run.training_state import open_run
from engine.checkpoint.weight_source import WeightSource
from engine.conversion.import_export import export_hf
from engine.conversion.merged_model import MergedSource
from engine.conversion.peft_write import export_peft, form_for, unread_by_peft
from engine.conversion.proof import prove_adapter
from engine.errors import UserError
from engine.models.names import CORRECTION
from tests.adopted.peft_models import losses_alone
from tests.adopted.saved_models import stored
from tests.coverage.checks import PACKED, Result
from tests.coverage.rank_checks import small_with_stacks
from tests.unit.test_checkpoint_peft import trained_run

RANK, SCALE = 2, 0.5
"""Of a small model's adapters."""


def exported(model_type: str) -> Result:
    """Exports adapters, a merged model and a model trained in full; returns the largest difference of a loss, or under
    "export" a phrase on what was refused or differs. Where PEFT cannot take the adapter, "export_peft" says why."""
    with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
        try:
            return _exported(model_type, Path(folder))
        except UserError as error:
            return {"export": str(error).replace(f"{folder}/", "")}
        except FAULTS as error:
            return {"export": f"{type(error).__name__}: {first_line(error)}"}


def _exported(model_type: str, folder: Path) -> Result:
    small = small_with_stacks(model_type, ranks=1)
    stock: Any = small.model
    batch = proof_batch(PACKED, small.config.vocab_size)
    factors = _of_what_learns(small, reference(small, batch).gradients)
    wanted = reference(small, batch).losses
    logging.disable_progress_bar()
    with quiet():
        stock.save_pretrained(folder / "hf")
    base = open_source(folder / "hf", "adopted")
    found = {}
    if factors:
        lora = {"rank": RANK, "alpha": SCALE * RANK}
        run = open_run(trained_run(folder / "run", factors, folder / "hf", **lora))
        trained, settings = run.trained(), run.lora
        merged = MergedSource(base.model, base, trained, scale=SCALE)
        export_hf(merged, folder / "merged")
        found["export"] = _apart(_opened(stock, folder / "merged"), batch, wanted)
        try:
            form = form_for(trained, settings, base.model, "peft")[0]
            unread = unread_by_peft(trained, settings, base.model, form)
            proof = partial(prove_adapter, base=base, trained=trained, scale=SCALE, unread=unread)
            export_peft(trained, settings, base.model, folder / "adapter", form=form, proof=proof)
        except UserError as error:
            found["export_peft"] = str(error)
        else:
            found["export"] = max(found["export"], _apart(_with_peft(stock, folder), batch, wanted))
    phrase = _in_full(small, base, folder)
    return {**found, "export": phrase} if phrase else {"export": 0.0, **found}


def _of_what_learns(small: Small, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the factors of adapters that learn; the B of others becomes zero, as it stays in training. Some modules
    are only read for their weight, and others only choose."""
    found = {}
    for name, factor in small.factors.items():
        if gradients[f"{name.rpartition('.')[0]}.lora_B"].any():
            found[name] = factor.detach()
        elif name.endswith(".lora_B"):
            factor.data.zero_()
    return found


def _opened(stock: Any, folder: Path) -> Any:
    with quiet():
        model, info = type(stock).from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    strange = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    assert not strange, strange
    return model.eval()


def _with_peft(stock: Any, folder: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(_opened(stock, folder / "hf"), folder / "adapter").eval()


@torch.no_grad()
def _apart(model: Any, batch: Batch, wanted: Tensor) -> float:
    with quiet():
        return float((losses_alone(model, batch) - wanted).abs().max())


def _in_full(small: Small, base: WeightSource, folder: Path) -> str | None:
    """Trains every weight and compares what is written with transformers' own; returns a phrase on what differs."""
    stock: Any = small.model
    names = [name for name in base.tensor_names() if not name.endswith(CORRECTION)]
    trains = {base.model.names.to_hf(name).name for name in names}
    with torch.no_grad(), seeded(5):
        for parameter in (one for name, one in stock.named_parameters(remove_duplicate=False) if name in trains):
            parameter.add_(torch.randn_like(parameter) * 0.01)
    with quiet():
        stock.save_pretrained(folder / "own")
    changed = open_source(folder / "own", "adopted")
    run = open_run(trained_run(folder / "full", {name: changed.read_whole(name) for name in names}, folder / "hf"))
    export_hf(MergedSource(base.model, base, run.trained(), scale=0.0), folder / "written")
    found, expected = stored(folder / "written"), stored(folder / "own")
    if found.keys() != expected.keys():
        return f"names differ from save_pretrained's: {', '.join(sorted(found.keys() ^ expected.keys())[:4])}"
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    if different:
        return f"{len(different)} tensors differ from save_pretrained's, {different[0]} among them"
    read, own = _opened(stock, folder / "written").state_dict(), stock.state_dict()
    different = [name for name in own if not torch.equal(read[name], own[name])]
    return f"transformers reads {different[0]} with other numbers than were trained" if different else None
