"""Reads the calls of a Python training script that configure it (TrainingArguments, LoraConfig, ...), and the
defaults of the arguments that it parses itself; runs nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from engine.errors import UserError
from rankfold.migrating.given import OWN_LOOP, PROGRAM, Given
from rankfold.migrating.script_arguments import assigned, parsed_classes, parsed_names, script_arguments
from rankfold.migrating.script_data import data_set, splits

_ARGUMENTS = {
    "TrainingArguments": "", "Seq2SeqTrainingArguments": "", "SFTConfig": "trl sft", "DPOConfig": "trl dpo",
    "KTOConfig": "trl kto", "ORPOConfig": "trl orpo", "CPOConfig": "trl cpo", "RewardConfig": "trl reward",
    "GRPOConfig": "trl grpo",
}  # fmt: skip
"""Class of a trainer's arguments -> the command with the same arguments."""
_TRAINERS = (
    "Trainer", "SFTTrainer", "DPOTrainer", "KTOTrainer", "ORPOTrainer", "CPOTrainer", "GRPOTrainer", "Seq2SeqTrainer",
)  # fmt: skip
_OTHER_OBJECTIVES = re.compile(
    r"(?:BCO|GKD|RLOO|OnlineDPO|XPO|NashMD|PPO|PPOv2|PRM|TPO|Reward|GOLD|SDFT|SSD|SDPO|Distillation|AsyncGRPO|MiniLLM|GSPOToken|"
    r"IterativeSFT|DDPO|AlignProp|PAPO|GFPO)(?:Trainer|Config)"
)
"""Classes of TRL's that train something else."""
OBJECTIVES = (PROGRAM, OWN_LOOP, "trainer", "task_type", "tools", "environment_factory", "rollout_func")
"""Keys by which this module names a script's trained parameters, whatever its arguments are."""
_FUNCTIONS = ("reward_funcs", "tools", "environment_factory")
"""Arguments of trainers that are functions or classes of the script."""
SWITCHES = ("use_lora", "use_peft", "lora_enable")
"""Arguments of scripts that make adapters or leave it."""
_ADAPTED = ("LoraConfig", "get_peft_model", "prepare_model_for_kbit_training")
_LOSSES = ("compute_loss", "compute_loss_func", "get_batch_loss_metrics", "dpo_loss", "kto_loss", "training_step")
"""Functions of a trainer by which the objective is another one."""
FLAGS_OF_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save",
         "bias": "lora_bias", "task_type": "lora_task_type", "init_lora_weights": "lora_init_weights"}  # fmt: skip
_LORA = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Defaults of LoraConfig, which count wherever a script calls it itself; trainers' own arguments have others."""
_MODELS = ("ForCausalLM", "LanguageModel", "ForImageTextToText", "ForConditionalGeneration", "ForVision2Seq")
_OTHER_TRAINERS = (
    "unsloth.", "verl.", "torchtune.", "nemo_automodel.", "openrlhf.", "colossalai.", "torchtitan.", "litgpt.",
    "xtuner.", "megatron.bridge.",
)  # fmt: skip
"""Packages whose scripts are not read; a script that imports one is recognised by it."""
_OTHER_TASKS = re.compile(
    r"(?:Auto|TF|Flax)\w*For(?:\w*Classification|QuestionAnswering|MaskedLM|Seq2SeqLM|MultipleChoice|CTC)"
)
"""Classes of transformers' models whose task is not the next token."""
_MODEL = ("torch_dtype", "dtype", "load_in_8bit", "load_in_4bit", "attn_implementation", "trust_remote_code")
_OBJECTS = ("model", "tokenizer", "args", "train_dataset", "eval_dataset", "data_collator", "peft_config", "callbacks",
             "processing_class", "compute_metrics", "ref_model", "formatting_func", "optimizers", "self")  # fmt: skip


def read_python(text: str, source: str) -> list[Given]:
    """Returns the keywords of those calls, with plain values and names of plain values resolved, and before them the
    defaults of the script's own arguments.

    Raises:
        UserError: it is not Python.
    """
    tree = _parsed(text, source)
    names, own, parsed = _names(tree), script_arguments(tree), parsed_names(tree)
    given = [Given(source=source, key=PROGRAM, value=source), *_defaults(tree, source)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    classes = parsed_classes(tree)
    made = [kind for kind in (_name(call.func)[0] for call in calls) if kind in _ARGUMENTS]
    if len(made) > 1:
        raise UserError(
            f"{source} makes {' and '.join(made[:3])}, so that it may train more than once, and differently: give the "
            "script of one training."
        )
    kinds = {kind for kind in (*classes, *(_name(call.func)[0] for call in calls)) if kind}
    if not any(kind in _ARGUMENTS or kind.endswith("Trainer") for kind in kinds):
        given.append(Given(source=source, key=OWN_LOOP, value=source, idle=True))
    given += _own_losses(tree, source)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    given += [
        Given(source=source, key="task_type", value=name) for name in sorted(used) if _OTHER_TASKS.fullmatch(name)
    ]
    given += [Given(source=source, key=PROGRAM, value=name) for node in tree.body for name in _imported(node)]
    given += [
        Given(source=source, key="trainer", value=kind) for kind in sorted(kinds) if _OTHER_OBJECTIVES.fullmatch(kind)
    ]
    switch = next((one.value for one in given if one.key in SWITCHES), True)
    for call in calls:
        kind, owner = _name(call.func)
        if kind in _ADAPTED and not switch:  # they run only where the argument says so
            continue
        if kind == "LoraConfig":
            given += [Given(source="LoraConfig's default", key=key, value=one, idle=True) for key, one in _LORA.items()]
        for key, node in _keys(call, kind, owner, names):
            value = _function_names(node, names) if key in _FUNCTIONS else _value(node, names, own, parsed)
            if isinstance(value, dict) and key == "lr_scheduler_kwargs":
                given += [Given(source=source, key=f"{key}.{name}", value=one) for name, one in value.items()]
            elif value != "" and not (_computed(value) and any(one.key == key for one in given)):
                given.append(Given(source=source, key=key, value=value))
    known = {one.key for one in given}
    for key, node in assigned(tree, _ARGUMENTS).items():
        value = _value(node, names, own, parsed)
        if not _computed(value) or key in known:
            given.append(Given(source=source, key=key, value=value))
    given[:0] = [
        Given(source=source, key=PROGRAM, value=_ARGUMENTS[kind]) for kind in sorted(kinds) if _ARGUMENTS.get(kind)
    ]
    if not kinds & {*_ARGUMENTS, *_TRAINERS, "LoraConfig"} and not own:
        raise UserError(
            f"{source} has no call of TrainingArguments, SFTConfig or the like whose options could be read, and "
            "parses no arguments: give the command line that starts it, with --flags."
        )
    return given


def _imported(node: ast.AST) -> list[str]:
    """Returns the modules that a statement imports from trainers whose scripts are not read."""
    found = [one.name for one in node.names] if isinstance(node, ast.Import) else []
    found += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
    return [name for name in found if f"{name}.".startswith(_OTHER_TRAINERS)]


def _own_losses(tree: ast.Module, source: str) -> list[Given]:
    """Returns the classes of a script that compute another loss than the trainer that they are made from."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return [
        Given(source=source, key="trainer", value=f"{node.name} with {part.name}")
        for node in classes
        for part in node.body
        if isinstance(part, ast.FunctionDef)
        and part.name in _LOSSES
        and any(_name(one)[0].endswith("Trainer") for one in node.bases)
    ]


def own_arguments(text: str, source: str) -> list[Given]:
    """Returns the defaults of the arguments that a script parses, those that are plain values.

    Raises:
        UserError: it is not Python.
    """
    return _defaults(_parsed(text, source), source)


def _defaults(tree: ast.Module, source: str) -> list[Given]:
    names, own, parsed = _names(tree), script_arguments(tree), parsed_names(tree)
    values = {key: _value(node, names, own, parsed) for key, node in own.items()}
    return [
        Given(source=source, key=key, value=value)
        for key, value in values.items()
        if value not in ("", None) and not _computed(value)
    ]


def _parsed(text: str, source: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UserError(f"{source} is not valid Python{line}: correct that line, or give a file that runs.") from None


def _computed(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("<computed")


def _keys(call: ast.Call, kind: str, owner: str, names: dict[str, ast.expr]) -> Iterator[tuple[str, ast.expr]]:
    """Yields the keys of a call that configures training, as the flag of that name would be called.

    Raises:
        UserError: its options come from elsewhere, as **OPTIONS that the script does not write out.
    """
    pairs = _pairs(call, kind, names)
    if kind in _ARGUMENTS and call.args:
        yield "output_dir", call.args[0]
    if kind in _TRAINERS:
        model = next((value for key, value in pairs if key == "model"), call.args[0] if call.args else None)
        model = names.get(model.id) if isinstance(model, ast.Name) else model
        if isinstance(model, ast.Constant) and isinstance(model.value, str):
            yield "model_name_or_path", model
    if kind in _ARGUMENTS or kind in _TRAINERS:
        yield from ((key, value) for key, value in pairs if key not in _OBJECTS)
        yield from splits(call, names)
    elif kind == "LoraConfig":
        yield "use_lora", ast.Constant(True)
        yield from ((FLAGS_OF_LORA.get(key, key), value) for key, value in pairs)
    elif kind == "BitsAndBytesConfig":
        yield from pairs
    elif kind == "from_pretrained" and owner.endswith(_MODELS):
        if call.args:
            yield "model_name_or_path", call.args[0]
        yield from ((key, value) for key, value in pairs if key in _MODEL)
    elif kind == "load_dataset":
        yield from data_set(call, names)
    elif kind in ("prepare_model_for_kbit_training", "get_peft_model"):
        yield "use_lora", ast.Constant(True)


def _pairs(call: ast.Call, kind: str, names: dict[str, ast.expr]) -> list[tuple[str, ast.expr]]:
    """Returns the keywords of a call, with those of **OPTIONS where the script writes these out."""
    pairs: list[tuple[str, ast.expr]] = []
    for keyword in call.keywords:
        node = keyword.value
        if keyword.arg:
            pairs.append((keyword.arg, node))
            continue
        node = names.get(node.id, node) if isinstance(node, ast.Name) else node
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            keys = [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]
            pairs += _plain_ones(zip(keys, node.values, strict=True), kind)
        elif isinstance(node, ast.Call) and _name(node.func)[0] == "dict" and not node.args:
            pairs += _plain_ones(_pairs(node, kind, names), kind)
        elif kind in _ARGUMENTS or kind == "LoraConfig":
            raise UserError(
                f"the script gives {kind} the options **{ast.unparse(keyword.value)[:60]}, which are only known when "
                "it runs: give them as a command line, with --flags."
            )
    return pairs


def _plain_ones(pairs: Iterable[tuple[str, ast.expr]], kind: str) -> list[tuple[str, ast.expr]]:
    """Returns the options from a mapping; those of a model that is read count where they are plain values."""
    return [(key, node) for key, node in pairs if kind != "from_pretrained" or isinstance(node, ast.Constant)]


def _name(function: ast.expr) -> tuple[str, str]:
    """Returns the name of the function called, and the name before its last dot."""
    if isinstance(function, ast.Attribute):
        return function.attr, _name(function.value)[0]
    return (function.id, "") if isinstance(function, ast.Name) else ("", "")


def _names(tree: ast.Module) -> dict[str, ast.expr]:
    """Returns the names assigned exactly once in the script, and parameters with a default, with their values."""
    found: dict[str, list[ast.expr]] = {}
    stored: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):  # also by +=, for, with and in tuples
            stored[node.id] = stored.get(node.id, 0) + 1
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found.setdefault(node.target.id, []).append(node.value)
        elif isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args]
            defaults = node.args.defaults
            for argument, default in zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True):
                found.setdefault(argument.arg, []).append(default)
    return {name: values[0] for name, values in found.items() if len(values) == 1 and stored.get(name, 0) <= 1}


def _function_names(node: ast.expr, names: dict[str, ast.expr]) -> Any:
    """Returns the names of functions in a list, or of the only one."""
    if isinstance(node, ast.Name) and isinstance(names.get(node.id), ast.List | ast.Name):
        return _function_names(names[node.id], names)
    found = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    if all(isinstance(one, ast.Name) for one in found):
        return [one.id for one in found if isinstance(one, ast.Name)]
    return _value(node, names)


def _value(
    node: ast.expr,
    names: dict[str, ast.expr],
    own: dict[str, ast.expr] | None = None,
    parsed: Collection[str] = (),
    depth: int = 0,
) -> Any:
    """Returns the value of a plain expression; text that begins with "<computed" for any other.

    Args:
        node: the expression.
        names: variables, with their only value.
        own: arguments that the script parses, with their defaults.
        parsed: variables that hold the parsed arguments.
        depth: of names that stand for others.
    """
    if isinstance(node, ast.Name) and node.id in names and depth < 10:
        return _value(names[node.id], names, own, parsed, depth + 1)
    if isinstance(node, ast.Attribute) and _name(node)[1] in ("torch", "TaskType"):
        return node.attr
    if isinstance(node, ast.Attribute) and _name(node)[1] in parsed and own and node.attr in own and depth < 10:
        return _value(own[node.attr], names, own, parsed, depth + 1)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return f"<computed: {ast.unparse(node)[:60]}>"
    return list(value) if isinstance(value, tuple | set) else value
