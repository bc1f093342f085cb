"""Data options: which text is trained on, and how it becomes rows of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from engine.config.checks import require, require_at_least, require_choices
from engine.config.option import IGNORED, REPORTED, option

Format = Literal["auto", "text", "completion", "alpaca", "sharegpt", "messages", "tokens"]
Packing = bool | Literal["concatenate"]
SharePrefixes = bool | Literal["auto"]
Overlong = Literal["truncate", "cut", "drop", "error"]
FORMATS: tuple[Format, ...] = get_args(Format)
OVERLONG: tuple[Overlong, ...] = get_args(Overlong)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """Data: which text, and how it becomes rows of tokens.

    Args:
        train: File with the training samples (.jsonl, .json, .csv, .parquet or .txt); a data set on the Hugging Face
            hub, as hub:OWNER/NAME or hub:OWNER/NAME@REVISION?subset=main&split=train (docs/hub.md); a store that
            rankfold preprocess wrote; or Megatron's indexed data, named by its .bin or by the common prefix of its .bin
            and .idx. Stores and indexed data are mapped into memory, not read.
        mix: Further training data, as PATH=WEIGHT. data.train has weight 1; an epoch reads every one of them at
            least once, and repeats those that are small for their weight.
        validation: File with the samples for evaluation; null evaluates nothing.
        validation_split: Share of the rows of data.train held out for evaluation, instead of a data.validation file,
            such as 0.05; train.seed decides which rows. null holds none out.
        image_folder: Folder that the paths of images in records are relative to; null for the folder of the records'
            own file.
        format: Shape of a record. "text" has text; "completion" has prompt and completion; "alpaca" has
            instruction, input and output; "sharegpt" has conversations; "messages" has messages with roles, which go
            through the tokenizer's chat template; "tokens" has input_ids and, where not all of them are trained on,
            labels. "auto" looks at the fields of the first record.
        seq_length: Maximum number of tokens in a row.
        packing: Put several samples in one row. true fits whole samples into rows, and attention never crosses from one
            to another; "concatenate" joins all samples end to end, as MLPerf does, and cuts the result into rows of
            data.seq_length, where attention and positions ignore sample boundaries.
        share_prefixes: Compute the beginning that samples of a row have in common once: the prompt of a group of
            completions, the question of a pair of answers, a long system prompt. "auto" does so where at least a
            twentieth of the tokens is saved, the model's layers allow it, and (of texts) data.packing is true; true
            wherever anything is saved; false never. The loss and its gradients stay what they are; dropout drops the
            same of a shared token for all samples that share it.
        overlong: Handling of a sample longer than data.seq_length. "truncate" cuts off its end, "drop" skips it
            (both are counted and reported), "cut" splits it into several samples, "error" stops. With data.packing
            concatenate nothing is too long, and "truncate" keeps everything.
        mask_prompt: Compute the loss only on the answer (completion, output, assistant turns); false computes
            it on everything.
        chat_template: Chat template for conversations: a file, or chatml, llama2, llama3, mistral, gemma, phi3,
            qwen2.5, qwen3, zephyr, vicuna or alpaca; null takes the tokenizer's own. Well-known templates are
            trained on as in TRL: every turn shows its reasoning, with Qwen3's an empty block where there is none.
        chat_arguments: Variables for the chat template, such as {enable_thinking: false}.
        learn_after_end: Train on the white space that a chat template writes after the token that ends an answer (the
            line break after <|im_end|>), as TRL does. false stops at that token, where generation stops too.
        show: Number of training samples to print before training, with the trained tokens marked.
        num_workers: Background workers that prepare batches; 0 prepares them in the training process.
        tokenizer: Folder or sentencepiece .model file of the tokenizer, or its name on the hub; null takes the
            one in model.path.
    """

    train: str | None = option(None, IGNORED)  # its content is compared by fingerprint
    mix: tuple[str, ...] = option((), REPORTED)
    validation: str | None = option(None, REPORTED)
    validation_split: float | None = option(None, REPORTED)
    image_folder: str | None = option(None, IGNORED)  # images are in that fingerprint
    format: Format = option("auto", REPORTED)
    seq_length: int = option(2048, REPORTED)
    packing: Packing = option(False, REPORTED)
    share_prefixes: SharePrefixes = option("auto", REPORTED)
    overlong: Overlong = option("truncate", REPORTED)
    mask_prompt: bool = option(True, REPORTED)
    chat_template: str | None = option(None, REPORTED)
    chat_arguments: dict[str, Any] | None = option(None, REPORTED)
    learn_after_end: bool = option(True, REPORTED)
    show: int = option(0, IGNORED)  # printed
    num_workers: int = option(1, IGNORED)  # processes
    tokenizer: str | None = option(None, IGNORED)  # its tokens are compared by fingerprint

    @property
    def evaluates(self) -> bool:
        """Whether there is validation data."""
        return self.validation is not None or self.validation_split is not None

    @property
    def fills_rows(self) -> bool:
        """Whether a row may hold several samples, packed either way."""
        return self.packing is not False

    def __post_init__(self) -> None:
        require_choices("data", self)
        require_at_least("data.seq_length", self.seq_length, 2, "use for example 2048")
        if self.validation_split is not None:
            require(
                0 < self.validation_split < 1,
                f"data.validation_split is {self.validation_split}, but a share above 0 and below 1 is expected: use "
                "for example 0.05, or null for none.",
            )
            require(
                self.validation is None,
                f"data.validation is {self.validation} and data.validation_split is {self.validation_split:g}, but "
                "only one of them can be evaluated: remove one of the two.",
            )
        require_at_least("data.show", self.show, 0, "use for example 3")
        require_at_least("data.num_workers", self.num_workers, 0, "use for example 1")
        paths = {"train": self.train, "validation": self.validation, "tokenizer": self.tokenizer}
        for name, path in (paths | {"chat_template": self.chat_template, "image_folder": self.image_folder}).items():
            require(path != "", f"data.{name} is empty, but a path is expected: give a path, or null for none.")
        for entry in self.mix:
            _, weight = split_mix(entry)
            require(
                1e-6 <= weight <= 1e6,
                f"data.mix contains {entry!r}, but a weight from 1e-6 to 1e6 is expected: correct it.",
            )


def split_mix(entry: str) -> tuple[str, float]:
    """Returns path and weight of an entry of data.mix; a weight that is not a number becomes 0.

    Raises:
        UserError: there is no =.
    """
    path, sign, weight = entry.rpartition("=")
    require(
        bool(sign and path), f"data.mix contains {entry!r}, but PATH=WEIGHT is expected: write for example a.jsonl=0.5."
    )
    try:
        return path, float(weight)
    except ValueError:
        return path, 0.0
