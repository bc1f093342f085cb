"""The product's files as syntax trees: modules, imports, definitions, circles. Nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

FOLDERS = ("engine", "rankfold", "triton_kernels")
WINGS: dict[str, tuple[str, ...]] = {
    "engine.vision": (),
    "engine.experts": (),
    "engine.adopted": ("engine.vision",),
    "engine.hybrids": ("engine.experts",),
    "engine.gemma4": ("engine.experts",),
    "engine.distillation": (),
    "engine.rollouts": ("engine.distillation",),
    "engine.preferences": ("engine.vision",),
    "engine.judges": ("engine.preferences",),
    "engine.tenants": (),
    "engine.hub": (),
    "rankfold.serving": ("engine.tenants",),
    "rankfold.evaluating": (),
    "rankfold.migrating": (),
    "rankfold.launching": (),
    "rankfold.recipes": (),
}
"""What some runs use -> the wings that it may import. All else of `engine` and `triton_kernels` is the core."""

LATE = re.compile(r"(?:engine|rankfold)(?:\.\w+)+:\w+")
"""A name that `engine.seams.resolve` turns into the object."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


def wing_of(module: str) -> str | None:
    """Returns the wing that holds a module."""
    return next((wing for wing in WINGS if f"{module}.".startswith(f"{wing}.")), None)


@dataclass(frozen=True)
class Import:
    """One name that an import statement binds.

    Args:
        line: of the statement.
        module: that it imports, or imports from.
        name: that it takes from `module`, None for the module itself.
        bound: the name in the importing file.
    """

    line: int
    module: str
    name: str | None
    bound: str


@dataclass(frozen=True, eq=False)
class Source:
    """One file: its module's name, its path below the tree, its text, and what it imports of the product anywhere."""

    module: str
    path: str
    text: str
    tree: ast.Module
    imports: tuple[Import, ...] = ()
    definitions: Mapping[str, Definition] = field(default_factory=dict)
    """Its functions and classes at the top level."""

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    def functions(self) -> Iterator[Function]:
        """Yields every function, those inside of others too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))


class Tree:
    """All product files of a checkout.

    Args:
        root: folder of the checkout.
        moves: module names of that checkout -> their names today, for one from before the wings had folders.
        folders: that are read.
    """

    def __init__(self, root: Path, moves: Mapping[str, str] | None = None, *, folders: Sequence[str] = FOLDERS) -> None:
        self.root, self._moves = root, moves or {}
        found: dict[str, tuple[str, str]] = {}
        for folder in folders:
            for file in sorted((root / folder).rglob("*.py")):
                path = file.relative_to(root).as_posix()
                found[path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = (
                    path,
                    file.read_text(encoding="utf-8"),
                )
        self._names = frozenset(found)
        self.sources = {name: self._source(name, path, text) for name, (path, text) in found.items()}

    def _source(self, module: str, path: str, text: str) -> Source:
        tree = ast.parse(text)
        named = {node.name: node for node in tree.body if isinstance(node, Definition)}
        return Source(module, path, text, tree, tuple(self._imports(module, path, tree)), named)

    def _imports(self, module: str, path: str, tree: ast.Module) -> Iterator[Import]:
        parts = module.split(".")
        package = parts if path.endswith("/__init__.py") else parts[:-1]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if (name := self.plain(alias.name)) in self._names:
                        yield Import(node.lineno, name, None, alias.asname or alias.name.partition(".")[0])
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                name = self.plain(".".join([*base, *([node.module] if node.module else [])]))
                for alias in node.names:
                    bound = alias.asname or alias.name
                    if (inner := f"{name}.{alias.name}") in self._names:
                        yield Import(node.lineno, inner, None, bound)
                    elif name in self._names:
                        yield Import(node.lineno, name, alias.name, bound)

    @staticmethod
    def plain(module: str) -> str:
        """Returns the name by its file: triton_kernels is also the package engine.kernels.triton."""
        outside, inside = "triton_kernels", "engine.kernels.triton"
        return outside + module.removeprefix(inside) if f"{module}.".startswith(f"{inside}.") else module

    def wing(self, module: str) -> str | None:
        """Returns the wing that holds a module, by its name of today."""
        return wing_of(self._moves.get(module, module))

    def is_core(self, module: str) -> bool:
        return module.partition(".")[0] in ("engine", "triton_kernels") and self.wing(module) is None

    def arrows_to_wings(self) -> list[tuple[str, str]]:
        """Returns (file of the core, module of a wing) for each import statement, wherever it stands in the file."""
        return [
            (source.path, module)
            for source in self.sources.values()
            if self.is_core(source.module)
            for _, module in sorted({(one.line, one.module) for one in source.imports if self.wing(one.module)})
        ]

    def late_names(self) -> list[tuple[str, str]]:
        """Returns (file, "module:NAME") of each text in the product that names an object so."""
        return [
            (source.path, node.value)
            for source in self.sources.values()
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and LATE.fullmatch(node.value)
        ]

    def defines(self, module: str, name: str) -> bool:
        """Whether a name is bound at the top level of a module."""
        module = self.plain(module)
        source = self.sources.get(module)
        if source is None or self.lookup(module, name) is not None:
            return source is not None
        assigned = (node for node in source.tree.body if isinstance(node, ast.Assign | ast.AnnAssign))
        return name in {one.id for node in assigned for one in ast.walk(node) if isinstance(one, ast.Name)}

    def find(self, name: str, under: str = "engine") -> Source | None:
        """Returns the first file under a package that defines `name` at its top level."""
        for source in self.sources.values():
            if f"{source.module}.".startswith(f"{under}.") and name in source.definitions:
                return source
        return None

    def lookup(self, module: str, name: str) -> tuple[Source, Definition] | Source | None:
        """Returns the definition, or the module, that a top-level name of a module stands for, through re-exports."""
        seen: set[tuple[str, str]] = set()
        while (module, name) not in seen and (source := self.sources.get(module)) is not None:
            seen.add((module, name))
            if (node := source.definitions.get(name)) is not None:
                return source, node
            bound = next((one for one in source.imports if one.bound == name), None)
            if bound is None:
                return self.sources.get(f"{module}.{name}")
            if bound.name is None:
                return self.sources.get(bound.module)
            module, name = bound.module, bound.name
        return None

    @cached_property
    def of_text(self) -> dict[str, str]:
        """The names to resolve that language modeling has in tables: by field, a default or given in its row."""
        nodes = [node for source in self.sources.values() for node in ast.walk(source.tree)]
        named = [
            (node.target.id, node.value)
            for node in nodes
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
        rows = (
            pair for node in nodes if isinstance(node, ast.Dict) for pair in zip(node.keys, node.values, strict=True)
        )
        for key, value in rows:
            if isinstance(key, ast.Constant) and key.value == "language_modeling" and isinstance(value, ast.Call):
                named += [(word.arg or "", word.value) for word in value.keywords]
        texts = ((name, value.value) for name, value in named if isinstance(value, ast.Constant))
        return {name: text for name, text in texts if isinstance(text, str) and LATE.fullmatch(text)}

    @cached_property
    def graph(self) -> dict[str, set[str]]:
        """The modules that each module imports, wherever the statement stands, itself left out."""
        return {name: {one.module for one in source.imports} - {name} for name, source in self.sources.items()}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns the groups of nodes that reach each other, through any number of steps."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        reached[start], waiting = set(), [*graph[start]]
        while waiting:
            if (node := waiting.pop()) not in reached[start]:
                reached[start].add(node)
                waiting += graph[node]
    groups = {frozenset(other for other in below if node in reached[other]) for node, below in reached.items()}
    return sorted(sorted(group) for group in groups if group)
