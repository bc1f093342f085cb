"""Executes commands on one base whose tenants are the clients' models; see `rankfold.serving.exchange.Backend`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.config.lora import LoraOptions
from engine.config.model import ModelOptions
from engine.config.run import RunConfig
from engine.config.train import TrainOptions
from engine.errors import UserError
from engine.files.documents import read_json as read_config
from engine.files.refusals import FileError
from engine.inference.generate import context_limit
from engine.runtime.launch import Launch
from engine.seams import resolve
from engine.telemetry.log import Log
from engine.telemetry.process_memory import resident_bytes, total_memory_bytes
from engine.tenants.tenants import Tenants
from engine.training.build import Training
from engine.training.gathering import gather_whole
from rankfold.serving.adapter_file import Written, read_adapter, read_written, write_adapter
from rankfold.serving.answers import forward_backward_answer
from rankfold.serving.commands import (
    Adapter,
    Saved,
    read_adam,
    read_expiry,
    read_follows,
    read_json,
    read_metadata,
    read_name,
    read_path,
    whole_of,
)
from rankfold.serving.commands import read_adapter as read_adapter_options
from rankfold.serving.exchange import PROTOBUF, Outcome, Restored, SavedWeights, ServedModel, Task, failure, success
from rankfold.serving.figures import Usage
from rankfold.serving.folder import ServerFolder, sampler_of
from rankfold.serving.images import ClientImages
from rankfold.serving.loss_request import ForwardBackward, read_forward_backward
from rankfold.serving.losses import TokenInputs, loss_and_metrics
from rankfold.serving.peft_files import read_tensors, write_archive, write_folder, written_by
from rankfold.serving.protobuf import encode
from rankfold.serving.ranks import Ranks
from rankfold.serving.residents import Residents
from rankfold.serving.rows import FILLER
from rankfold.serving.sample_request import Sample, read_sample
from rankfold.serving.sampling import Sampler
from rankfold.serving.scores import Scores
from rankfold.serving.spread import Spread
from rankfold.serving.traced_losses import TracedLosses, metrics_of

ALPHA = 32.0
"""Numerator of the scale of every adapter, as the protocol's service has it."""
_ATTENTION, _MLP = r".*attn\..*", r".*mlp\..*"


class TenantBackend:
    """The model with its adapters, in this process.

    Args:
        options: of the model.
        folder: of the server.
        launch, log: of this process.

    Raises:
        UserError: no such model, or one whose adapters cannot share a base.
    """

    def __init__(self, options: ServedModel, folder: ServerFolder, launch: Launch, log: Log) -> None:
        self._options, self._folder = options, folder
        self.ranks = Ranks(launch.rank, launch.world_size)
        self._tenants = Tenants(self._config(None), launch, log, tokens=options.tokens)
        self._decoder = self._tenants.base.source.model.decoder
        self.context = context_limit(self._decoder)
        limit = self.ranks.told(_quarter(launch) if options.resident is None else options.resident * 2**30)
        self._residents = Residents(self._tenants, self._config, folder, self.ranks, limit=limit)
        self._spread = Spread(self._tenants.base, options.parallel, self.ranks, options.tokens)
        self._images = ClientImages(self._family)
        self._sampler = Sampler(options.path, self.ranks, self._images, slots=options.slots, context=self.context)
        self._traced = TracedLosses(folder, self.ranks)
        self._scores = Scores(self._spread, self.ranks, self._images)

    def open_tokenizer(self) -> None:
        """Opens the tokenizer, which samples need.

        Raises:
            UserError: there is none that opens.
        """
        assert self._sampler.tokenizer is not None

    def _family(self) -> Any:
        """Returns the vision family of the base; None where it sees no images."""
        if not self._decoder.sees_images:
            return None
        config = read_config(self._options.path / "config.json", "copy it again")
        return resolve(self._decoder.images)(config, self._options.path, self._sampler.tokenizer)

    def restore(self, model: str) -> Restored | None:
        """See `rankfold.serving.exchange.Backend`."""
        path = self._folder.model(model)
        written = self.ranks.decided(lambda: read_written(path, _LOST_MODEL))
        if written is None:
            return None
        self._residents.note(model, written.adapter)
        answer = success(written.request, json.loads(written.answer), written.adapter)
        return Restored(seq=written.seq, outcome=answer)

    def execute(self, tasks: Sequence[Task]) -> list[Outcome]:
        """See `rankfold.serving.exchange.Backend`."""
        try:
            return self._execute(tasks)
        finally:
            self._images.clear()

    def _execute(self, tasks: Sequence[Task]) -> list[Outcome]:
        kinds: dict[str, Callable[[Task], Outcome]] = {
            "create_model": self._create,
            "optim_step": self._step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save,
            "save_weights_external": self._save_external,
            "archive": self._archive,
            "load_weights": self._load,
            "unload_model": self._unload,
            "create_custom_loss": self._traced.create,
        }
        if tasks[0].kind == "forward_backward":
            of_model = {task.target: task for task in tasks}
            done = [
                self._forward_backward([of_model[one] for one in part]) for part in self._residents.parts([*of_model])
            ]
            return [outcome for part in done for outcome in part]
        if tasks[0].kind == "asample":
            return self._sample(tasks)
        return [_refused(task, kinds[task.kind]) for task in tasks]

    def usage(self) -> Usage:
        """Returns what the processes hold. Collective."""
        device, held, total = self._tenants.base.stages.step.device, 0, 0
        if device.type == "cuda":
            held = torch.cuda.memory_allocated(device)
            total = torch.cuda.get_device_properties(device).total_memory
        found = self.ranks.gathered((resident_bytes(), held, total))
        hosts, devices, totals = (tuple(one[place] for one in found) for place in range(3))
        known = device.type == "cuda"
        resident, resting = self._residents.counts()
        return Usage(
            resident=resident,
            resting=resting,
            host_bytes=hosts,
            device_bytes=devices if known else (),
            device_total=totals if known else (),
        )

    def _config(self, adapter: Adapter | None) -> RunConfig:
        options = self._options
        lora = LoraOptions(rank=1)
        if adapter is not None:
            blocks = [name for name, wanted in ((_ATTENTION, adapter.train_attn), (_MLP, adapter.train_mlp)) if wanted]
            targets = tuple(blocks + ["lm_head"] * adapter.train_unembed)
            # train_mlp leaves routers as they are, and towers of images stay those of the base
            whole = {"router": self._decoder.num_experts, "vision.*": self._decoder.sees_images}
            others = tuple(name for name, there in whole.items() if there)
            lora = LoraOptions(rank=adapter.rank, alpha=ALPHA, targets=targets, exclude=others, fused="none")
        return RunConfig(
            model=ModelOptions(
                path=str(options.path),
                dtype=options.dtype,
                base_dtype=options.base_dtype,
                kernels=options.kernels,
            ),
            lora=lora,
            parallel=options.parallel,
            train=TrainOptions(seed=0 if adapter is None else adapter.seed),
        )

    def _training(self, model: str) -> Training:
        return self._residents.wake(model)

    def _create(self, task: Task) -> Outcome:
        seed = int.from_bytes(hashlib.sha256(task.target.encode()).digest()[:4], "little") % 2**31
        adapter = read_adapter_options(read_json(task.body), seed)
        self._residents.create(task.target, adapter)
        answer = {"model_id": task.target, "type": "create_model"}
        self._write(task, answer)
        return success(task.request, answer, adapter)

    def _write(self, task: Task, answer: Mapping[str, object]) -> None:
        """Makes a model durable as it is after a task."""
        write_adapter(
            self._folder.model(task.target),
            self._training(task.target),
            self.ranks,
            self._residents.adapter(task.target),
            request=task.request,
            seq=task.seq,
            answer=json.dumps(dict(answer)),
        )

    def _forward_backward(self, tasks: Sequence[Task]) -> list[Outcome]:
        outcomes: dict[str, Outcome] = {}
        residents = self._residents
        training: list[tuple[Task, ForwardBackward]] = []
        for task in tasks:
            try:
                request = read_forward_backward(
                    task.body, vocab_size=self._decoder.vocab_size, limit=self.context, images=self._images
                )
                request = self._traced.bound(task.target, request)
                self._residents.wake(task.target, keep=[one.target for one in tasks])
            except UserError as error:
                outcomes[task.request] = failure(task.request, str(error))
                continue
            if request.forward_only:
                outcomes[task.request] = self._forward(task, request)
            else:
                training.append((task, request))
        if training:
            batches = {}
            for task, request in training:
                batches[residents.number(task.target)] = self._spread.own(self._spread.micro_batches(request))
                residents.loss(task.target).begin()
                residents.has_gradient(task.target, True)
            # losses are sums over tokens, so that nothing is divided by how many there are
            losses = self._tenants.gradients(batches, dict.fromkeys(batches, 1.0))
            known = self._spread.gathered({task.target: residents.loss(task.target).logps for task, _ in training})
            traced = {task.target: residents.loss(task.target).metric_sums for task, one in training if one.program}
            sums = self._spread.gathered(traced) if traced else {}
            for task, request in training:
                loss, own = float(losses[residents.number(task.target)]), sums.get(task.target)
                metrics = metrics_of(request, torch.stack(own).sum(0) if own else None)
                outcomes[task.request] = self._answer(task, request, known[task.target], loss, metrics, keeps=True)
        return [outcomes[task.request] for task in tasks]

    def _forward(self, task: Task, request: ForwardBackward) -> Outcome:
        batches = self._spread.micro_batches(request)
        found = self._spread.log_probabilities(self._training(task.target), batches)
        parts = self._spread.gathered({"": found})[""]
        given = [batch.part(TokenInputs) for own in batches for batch in own]
        inputs = [one for one in given if one is not None and one.place != FILLER]
        figures = [loss_and_metrics(logps, own) for logps, own in zip(parts, inputs, strict=False)]
        loss = sum(float(one) for one, _ in figures)
        metrics = metrics_of(request, torch.stack([one for _, one in figures]).sum(0) if figures else None)
        return self._answer(task, request, parts, loss, metrics)

    def _answer(
        self,
        task: Task,
        request: ForwardBackward,
        logps: Sequence[Tensor],
        loss: float,
        metrics: Mapping[str, float],
        *,
        keeps: bool = False,
    ) -> Outcome:
        """Returns the outcome of a task, whose answer rank 0 alone has."""
        body = b""
        if self.ranks.is_first:
            body = forward_backward_answer(request, logps, {"loss:sum": loss, **metrics})
        tokens = sum(len(datum.tokens) for datum in request.data)
        return Outcome(request=task.request, good=True, type=PROTOBUF, body=body, keeps=keeps, tokens=tokens)

    def _step(self, task: Task) -> Outcome:
        options, training = read_adam(read_json(task.body)), self._training(task.target)
        training.optimizer.set_options(
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
            clip_grad_norm=options.grad_clip_norm,
        )
        # the gradient's norm alone decides whether the step is skipped: sums of losses have no limit
        norm = self._tenants.update(self._residents.number(task.target), options.learning_rate, torch.zeros(()))
        training.optimizer.flat.finish_publish()
        metrics = {"grad_norm": float(norm), "skipped": float(training.optimizer.skip)}
        answer: dict[str, object] = {"metrics": {name: one for name, one in metrics.items() if np.isfinite(one)}}
        self._write(task, answer)
        self._residents.has_gradient(task.target, False)
        return success(task.request, answer)

    def _save(self, task: Task) -> Outcome:
        request = read_json(task.body)
        answer: dict[str, object]
        follows = read_follows(request)
        if task.kind == "save_weights_for_sampler" and request.get("path") is None:
            saved = self._folder.inflight(task.target) if follows else self._folder.unnamed(task.target, task.seq)
            number = whole_of(request, "sampling_session_seq_id", 0, 2**31)
            answer = {"path": None, "sampling_session_id": sampler_of(task.target, number)}
        else:
            kind = "weights" if task.kind == "save_weights" else "sampler_weights"
            saved = Saved(model=task.target, kind=kind, name=read_name(request, f"seq-{task.seq}"))
            answer = {"path": str(saved)}
        answer["type"] = task.kind
        path = self._folder.saved(saved)

        def make_way() -> None:
            if follows or request.get("overwrite") is True:  # also what is damaged
                return
            there = read_written(path, "save under another name, or set overwrite to true")
            if there is not None and there.request != task.request:
                raise UserError(f"{saved} is there already: save under another name, or set overwrite to true.")

        def finish() -> int:
            for old in self._folder.old_unnamed(task.target):
                old.unlink(missing_ok=True)
            return path.stat().st_size

        self.ranks.decided(make_way)
        write_adapter(
            path,
            self._training(task.target),
            self.ranks,
            self._residents.adapter(task.target),
            request=task.request,
            seq=task.seq,
            answer=json.dumps(answer),
        )
        size = self.ranks.decided(finish)
        done = success(task.request, answer)
        if answer["path"] is None:
            return done
        expires, metadata = read_expiry(request), read_metadata(request)
        return replace(done, saved=SavedWeights(path=str(saved), num_bytes=size, expires=expires, metadata=metadata))

    def _save_external(self, task: Task) -> Outcome:
        """Saves a model as a PEFT adapter."""
        request = read_json(task.body)
        saved = Saved(model=task.target, kind="external_weights", name=read_name(request, f"seq-{task.seq}"))
        folder = self._folder.saved(saved)

        def make_way() -> None:
            if written_by(folder) not in (None, task.request):
                raise UserError(f"{saved} is there already: save under another name.")

        self.ranks.decided(make_way)
        training = self._training(task.target)
        tensors = gather_whole(training, training.optimizer.flat.master_shards())
        adapter = self._residents.adapter(task.target)
        size = self.ranks.decided(lambda: self._write_peft(folder, tensors, adapter, task.request))
        done = success(task.request, {"path": str(saved), "size_bytes": size, "type": task.kind})
        expires, metadata = read_expiry(request), read_metadata(request)
        return replace(done, saved=SavedWeights(path=str(saved), num_bytes=size, expires=expires, metadata=metadata))

    def _archive(self, task: Task) -> Outcome:
        """Writes an archive of saved weights as a PEFT adapter."""
        request = read_json(task.body)
        saved, made = read_path(request["path"]), float(request["made"])
        archive = self._folder.archive(saved, made)

        def write() -> None:
            path, written = self._saved(saved)
            folder = archive.with_suffix("")
            self._write_peft(folder, read_tensors(path), written.adapter, task.request)
            write_archive(archive, folder)

        self.ranks.decided(write)
        return success(task.request, {"path": str(saved), "type": task.kind})

    def _write_peft(self, folder: Path, tensors: Mapping[str, Tensor], adapter: Adapter, request: str) -> int:
        lora, model = self._config(adapter).lora, self._tenants.base.source.model
        return write_folder(folder, tensors, lora, model, self._options.name or str(self._options.path), request)

    def _load(self, task: Task) -> Outcome:
        request = read_json(task.body)
        saved, optimizer = read_path(request.get("path")), request.get("optimizer") is True
        path, written = self.ranks.decided(lambda: self._saved(saved))
        made = task.target not in self._residents
        if made:
            self._residents.create(task.target, written.adapter)
        adapter = self._residents.adapter(task.target)
        if replace(adapter, seed=0) != replace(written.adapter, seed=0):
            raise UserError(
                f"{saved} has rank {written.adapter.rank}, and other linears or another rank than this model, which "
                f"has {adapter.rank}: load it into a model that is created from it."
            )
        try:
            read_adapter(path, self._training(task.target), self.ranks, written, optimizer=optimizer)
        except UserError:
            if made:
                self._residents.remove(task.target)
            raise
        self._residents.has_gradient(task.target, False)
        answer: dict[str, object] = {"path": str(saved), "model_id": task.target, "type": "load_weights"}
        self._write(task, answer)
        return success(task.request, answer, adapter if made else None)

    def _saved(self, saved: Saved) -> tuple[Path, Written]:
        path = self._folder.saved(saved)
        written = read_written(path)
        if written is None:
            raise UserError(
                f"there are no weights at {saved}: they have expired, or are older unnamed ones, of which a model "
                "keeps the newest."
            )
        return path, written

    def _unload(self, task: Task) -> Outcome:
        if task.target in self._residents:  # else the process ended after its file was deleted
            self._residents.remove(task.target)
        self.ranks.decided(lambda: self._folder.model(task.target).unlink(missing_ok=True))
        return success(task.request, {"model_id": task.target, "type": "unload_model"})

    def _sample(self, tasks: Sequence[Task]) -> list[Outcome]:
        outcomes: dict[str, Outcome] = {}
        requests: dict[str, Sample] = {}
        try:
            training = self._reader(tasks[0].target)
        except UserError as error:
            return [failure(task.request, str(error)) for task in tasks]
        for task in tasks:
            try:
                requests[task.request] = read_sample(
                    read_json(task.body), vocab_size=self._decoder.vocab_size, limit=self.context, images=self._images
                )
            except UserError as error:
                outcomes[task.request] = failure(task.request, str(error))
        answers = self._sampler.run(training, requests)
        fields = self._scores.add(training, requests, answers)
        for name in requests:
            body = encode("SampleResponse", fields[name]) if self.ranks.is_first else b""
            tokens = sum(len(one["tokens"]) // 4 for one in answers.get(name, ()))
            outcomes[name] = Outcome(request=name, good=True, type=PROTOBUF, body=body, tokens=tokens)
        return [outcomes[task.request] for task in tasks]

    def _reader(self, target: str) -> Training:
        """Returns a model with saved weights, or the base for "".

        Raises:
            UserError: the weights are not there.
        """
        if not target:
            return self._tenants.base
        saved = read_path(target)
        path, written = self.ranks.decided(lambda: self._saved(saved))
        return self._residents.reader(path, written)


def _quarter(launch: Launch) -> float:
    """Returns a quarter of the bytes that are free on this rank's device."""
    if launch.device.type == "cuda":
        return float(torch.cuda.mem_get_info(launch.device)[0]) / 4
    return total_memory_bytes() / 4


_LOST_MODEL = "restore it from a copy, or delete it, which gives its model up, and the others go on"
"""What is to be done where the file of a model is damaged."""
_COPIES = ("save_weights", "save_weights_for_sampler", "save_weights_external", "archive", "create_custom_loss")
"""Commands that change files alone."""


def _refused(task: Task, execute: Callable[[Task], Outcome]) -> Outcome:
    try:
        return execute(task)
    except UserError as error:
        if isinstance(error, FileError) and task.kind not in _COPIES:
            raise  # memory is ahead of the disk, on which the model is as it was acknowledged
        return failure(task.request, str(error), "server" if isinstance(error, FileError) else "user")
