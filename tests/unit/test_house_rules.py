"""Rules of CONTRIBUTING that the syntax tree can show: no global state, no broad `except`, no configuration below."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.unit.test_layering import ROOT, SOURCES, imported_modules

ENGINE = [path for path in SOURCES if path.startswith(("engine/", "triton_kernels/"))]
PRODUCT = [path for path in SOURCES if path.startswith(("engine/", "triton_kernels/", "rankfold/", "tools/"))]

PROCESS_WIDE = {
    ("engine/api/process.py", "_TRAINING"): "a process trains one run at a time",
    ("engine/distributed/operations.py", "LOG"): "torch.distributed has one default group and one set of connections",
    ("engine/distributed/transfer_meter.py", "METER"): "the same; also measures collectives that are given no mesh",
    ("engine/telemetry/ending.py", "_joined"): "whether this process has joined others is a fact of the process",
    ("engine/telemetry/interrupts.py", "_PRESSES"): "a process gets a signal, and has one way to answer it",
    ("engine/telemetry/terminal.py", "_BOTTOM"): "all threads of a process write to one terminal",
    ("engine/telemetry/output.py", "_lost"): "whether anybody reads standard error is a fact of the process",
    ("engine/runtime/secrets.py", "_taken"): "a secret leaves the environment of the process when it is read",
    ("engine/kernels/native/loader.py", "RECORDING"): "each thread of a process records its own calls of one library",
    ("engine/files/platforms.py", "_SEEKING"): "on Windows the threads of a process share a file's place",
    ("engine/data/build_store.py", "_worker"): "a worker of a process pool gets what it works with as it starts",
}
"""State that belongs to no object, because a process has one of each."""

CATCHES_ALL = {
    ("engine/checkpoint/run/saver.py", "_begin.write"): "a thread hands its defect to the one that waits for the save",
    (
        "engine/data/opened_tokenizer.py",
        "_load_fast",
    ): "tokenizers raises Exception itself for what it cannot read",
    ("engine/telemetry/trackers.py", "_run"): "a thread hands a tracker's error to the one that waits for it",
    (
        "engine/data/tokenizer_worker.py",
        "answer",
    ): "a process that works with a tokenizer sends any error to the process that asked",
    (
        "engine/telemetry/errors.py",
        "run_command",
    ): "ends the process whatever happened, and waits for no rank",
    ("engine/adopted/structure.py", "read_config"): "each of transformers' config classes checks in its own way",
    ("engine/vision/data/files.py", "_readable"): "a broken file makes any of Python's errors in Pillow's decoders",
    ("engine/rollouts/rewards/worker.py", "_load_all"): "a file of reward functions is the user's program",
    ("engine/rollouts/rewards/worker.py", "scored"): "so is a reward function",
    ("engine/rollouts/rewards/worker.py", "described_error"): "and so is the class of an exception that it raises",
    ("engine/rollouts/turns/worker.py", "_loaded"): "a file of tools is the user's program",
    ("engine/rollouts/turns/worker.py", "host_of"): "so is what makes an environment",
    ("engine/rollouts/turns/worker.py", "answer"): "so are its reset and its get_reward",
    ("engine/rollouts/turns/worker.py", "_called"): "so are tools, whose exceptions are told to the model",
    ("engine/rollouts/turns/worker.py", "_words"): "and so is the class of such an exception",
    ("engine/rollouts/turns/openenv.py", "_asked"): "the client of OpenEnv raises what the packages below it raise",
    ("engine/rollouts/agents/worker.py", "_loaded"): "a file with an agent is the user's program",
    ("engine/rollouts/agents/worker.py", "answered"): "so is the agent",
    ("engine/rollouts/agents/worker.py", "tasks_of"): "so is an environment with its tasks",
    ("engine/rollouts/turns/feed.py", "_submit.run"): "a thread hands its defect to the one that samples",
    ("rankfold/benchmarking/processes.py", "_serve"): "a worker process sends any error to the process that asked",
    ("engine/data/template.py", "_run"): "a chat template is a program that comes with a model",
}
"""Where an error of any kind is caught and not raised again as it was."""

BELOW_CONFIGURATION = (
    "engine/layers", "engine/ops", "engine/models", "engine/optim", "engine/pipeline", "engine/quantization",
    "engine/distributed", "engine/kernels", "triton_kernels",
)  # fmt: skip
"""What is given numbers, dtypes and process groups."""

MUTATORS = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "reverse", "setdefault", "sort", "update",
}  # fmt: skip
CONTAINERS = {"Counter", "OrderedDict", "bytearray", "count", "defaultdict", "deque", "dict", "list", "local", "set"}
IMMUTABLE = {"Path", "TypeVar", "ParamSpec", "Decimal", "Fraction"}
"""Classes of libraries whose objects do not change."""


def read(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def last_name(node: ast.expr) -> str:
    """`c` of a.b.c and of c."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def immutable_classes() -> set[str]:
    """Frozen dataclasses, named tuples and enums of the engine, by name."""
    found = set(IMMUTABLE)
    for path in ENGINE:
        for node in ast.walk(read(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            frozen = any(
                isinstance(one, ast.Call)
                and any(word.arg == "frozen" and getattr(word.value, "value", False) is True for word in one.keywords)
                for one in node.decorator_list
            )
            if frozen or {last_name(base) for base in node.bases} & {"NamedTuple", "Enum", "StrEnum", "IntEnum"}:
                found.add(node.name)
    return found


def assignments(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, ast.expr | None]]:
    """The names that are bound outside of functions, with what they are bound to; those of a class behind its name."""
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{name}", value) for name, value in assignments(node.body))
        elif isinstance(node, ast.Assign):
            names = (name for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name))
            yield from ((name.id, node.value) for name in names)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = (one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt | ast.excepthandler))
            yield from assignments([*inner])


def is_state(value: ast.expr | None, immutable: set[str]) -> bool:
    """Whether a value is made to change: an empty container, or an object of a class whose objects can."""
    if isinstance(value, ast.List | ast.Set):
        return not value.elts
    if isinstance(value, ast.Dict):
        return False  # a table; one that is filled later is found where it is filled
    if isinstance(value, ast.Call):
        name = last_name(value.func)
        if name in CONTAINERS:
            return not value.args
        owner = last_name(value.func.value) if isinstance(value.func, ast.Attribute) else ""
        known = IMMUTABLE if owner in sys.stdlib_module_names else immutable  # both may have an Event
        return name.lstrip("_")[:1].isupper() and not name.isupper() and name not in known
    return False


def changed_names(tree: ast.Module, names: set[str]) -> set[str]:
    """Those of a module's own names that some function of it changes."""
    found: set[str] = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        arguments = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
        bound = arguments | {
            node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        globals_ = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
        found |= globals_
        for node in ast.walk(function):
            target: ast.expr | None = None
            if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                target = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
                target = node.func.value
            if isinstance(target, ast.Name) and target.id in names and target.id not in bound - globals_:
                found.add(target.id)
    return found


def state_of(tree: ast.Module, immutable: set[str]) -> set[str]:
    """The names of a module's state."""
    names = dict(assignments(tree.body))
    return {name for name, value in names.items() if is_state(value, immutable)} | changed_names(tree, {*names})


def test_no_module_has_state() -> None:
    immutable = immutable_classes()
    found = {(path, name) for path in ENGINE for name in state_of(read(path), immutable)}
    assert found == PROCESS_WIDE.keys()


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("seen = []", {"seen"}),
        ("seen: set[str] = set()", {"seen"}),
        ("METER = Meter()", {"METER"}),
        ("_lock = threading.Lock()", {"_lock"}),
        ("cache = {}\ndef f(x):\n    cache[x] = 1", {"cache"}),
        ("cache = {1: 2}\ndef f(x):\n    cache.update(x)", {"cache"}),
        ("here = None\ndef f():\n    global here\n    here = 1", {"here"}),
        ("options = Frozen()\ndef f():\n    options.a = 1", {"options"}),
        ("if True:\n    from a import b\n    late = deque()", {"late"}),
        ("TABLE = {1: 2}\nNAMES = ('a', 'b')\nPLAIN = Frozen(1)\nTYPE = Literal['a']\nNUMBER = max(1, 2)", set()),
        ("def f():\n    seen = []\n    seen.append(1)\nclass A:\n    seen = 1", set()),
        ("class A:\n    seen: list[int] = []", {"A.seen"}),
        ("seen = (1,)\ndef f(seen):\n    seen.append(1)", set()),
    ],
)
def test_state_is_found(source: str, names: set[str]) -> None:
    assert state_of(ast.parse(source), {"Frozen"}) == names


def broad_handlers(tree: ast.AST, inside: str = "") -> Iterator[str]:
    """Functions that catch everything, but for those that only clean up and raise the same error again."""
    for node in ast.iter_child_nodes(tree):
        name = inside
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{inside}.{node.name}".lstrip(".")
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            broad = any(kind is None or last_name(kind) in ("Exception", "BaseException") for kind in kinds)
            last = node.body[-1]
            leaves = any(isinstance(one, ast.Return | ast.Continue | ast.Break) for one in ast.walk(node))
            if broad and (leaves or not (isinstance(last, ast.Raise) and last.exc is None)):
                yield inside
        yield from broad_handlers(node, name)


def test_nothing_else_catches_everything() -> None:
    assert {(path, name) for path in PRODUCT for name in broad_handlers(read(path))} == CATCHES_ALL.keys()


@pytest.mark.parametrize(
    ("handler", "is_broad"),
    [
        ("except Exception:\n        pass", True),
        ("except:\n        pass", True),
        ("except (OSError, BaseException) as error:\n        say(error)", True),
        ("except Exception:\n        if a:\n            return\n        raise", True),
        ("except Exception as error:\n        raise UserError('no') from error", True),
        ("except BaseException:\n        close()\n        raise", False),
        ("except OSError:\n        pass", False),
    ],
)
def test_broad_handlers_are_found(handler: str, is_broad: bool) -> None:
    source = f"def f():\n    try:\n        work()\n    {handler}\n"
    assert list(broad_handlers(ast.parse(source))) == (["f"] if is_broad else [])


def test_lower_layers_never_see_the_configuration() -> None:
    found = {
        f"{path} imports {name}"
        for path in ENGINE
        if path.startswith(BELOW_CONFIGURATION)
        for name in imported_modules((ROOT / path).read_text(encoding="utf-8"), path.replace("/", "."), False)
        if name.startswith("engine.config")
    }
    assert found == set()


def test_the_lists_name_what_is_there() -> None:
    for path, name in (*PROCESS_WIDE, *CATCHES_ALL):
        assert name.rpartition(".")[2] in (ROOT / path).read_text(encoding="utf-8")
    assert all((ROOT / folder).is_dir() for folder in BELOW_CONFIGURATION)
    assert Path(ROOT, "engine/config").is_dir()
