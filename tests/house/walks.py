"""Walks: how many functions one visits to follow one parameter from call to call, and how many files they are in.

A walk starts at a function and one of its parameters. It goes through the function's calls from the first to the last
and enters each function of ours that is handed the parameter, then goes on inside, depth first, each function once. It
is static, so it takes every branch. Precisely:

- A value carries the parameter if it is the parameter; an attribute or an item of what carries it; a container, a
  choice or a comprehension of such; what a function that is not ours, or a method of an unknown class, makes of it
  (`Path(config.model.path)`); or an object that keeps it in an attribute. Names that are assigned, looped over or
  opened from such a value carry it too. What a function of ours returns does not, nor do comparisons, lengths and
  f-strings.
- A call is followed where an argument carries the parameter, or where the object whose method it is carries it or was
  constructed with it, and the function is known: by definition or import, as a method of a class that an annotation,
  `self`, a construction or a base class names, or by name in `resolve("module:NAME")`. Of `resolve(table.field)` the
  walk takes what language modeling has there. Functions that are handed on without a call are not entered, nor are
  those that only report (REPORTING).
- Constructing a class enters its `__init__`, or its `__post_init__`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.house.sources import Definition, Function, Source, Tree

Found = tuple[Source, Definition]
REPORTING = ("engine.telemetry", "engine.sentences", "engine.printable", "engine.files.refusals", "engine.errors")
PARTS: dict[type[ast.AST] | type[None], tuple[str, ...]] = {
    **dict.fromkeys((ast.Attribute, ast.Subscript, ast.Starred, ast.Await, ast.NamedExpr), ("value",)),
    **dict.fromkeys((ast.Tuple, ast.List, ast.Set), ("elts",)),
    **dict.fromkeys((ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp), ("generators",)),
    **dict.fromkeys((ast.Dict, ast.BoolOp), ("values",)),
    ast.IfExp: ("body", "orelse"),
    ast.BinOp: ("left", "right"),
    ast.comprehension: ("iter",),
}
"""The parts of an expression that it carries on."""
SCALARS = {"all", "any", "bool", "hasattr", "isinstance", "len", "type"}


@dataclass(frozen=True)
class Walk:
    """The functions that were visited, in order, as "path:name"."""

    visits: tuple[str, ...]

    @property
    def rooms(self) -> int:
        """The number of files that were entered."""
        return len({visit.partition(":")[0] for visit in self.visits})


def walk(tree: Tree, start: str, parameter: str) -> Walk | None:
    """Follows a parameter from a function of the engine; None where the tree has no such function."""
    source = tree.find(start)
    if source is None:
        return None
    visits: dict[str, None] = {}
    _visit(tree, visits, (source, source.definitions[start]), None, {parameter})
    return Walk(tuple(visits))


def _visit(tree: Tree, visits: dict[str, None], found: Found, owner: Found | None, carrying: set[str]) -> None:
    source, node = found
    assert isinstance(node, Function)
    if source.module.startswith(REPORTING):
        return
    name = f"{source.path}:{f'{owner[1].name}.' if owner else ''}{node.name}"
    if name not in visits:
        visits[name] = None
        _Body(tree, source, owner, carrying, _parameter_types(tree, found, owner)).follow(node, visits)


def _parameter_types(tree: Tree, found: Found, owner: Found | None) -> dict[str, Found]:
    names = _parameters(found[1])
    types = {one.arg: _annotated(tree, one.annotation, found[0]) for one in names}
    if owner is not None and names:
        types[names[0].arg] = owner
    return {name: kind for name, kind in types.items() if kind is not None}


@dataclass
class _Body:
    """What is known at one place of a function's body.

    Args:
        owner: class whose method it is.
        names: that carry what is followed.
        types: classes of ours that names are objects of.
        objects: names of objects that were constructed with it.
        late: names that `resolve` was assigned to.
    """

    tree: Tree
    source: Source
    owner: Found | None
    names: set[str]
    types: dict[str, Found]
    objects: set[str] = field(default_factory=set)
    late: dict[str, Found] = field(default_factory=dict)

    def follow(self, node: ast.AST, visits: dict[str, None]) -> None:
        for child in ast.iter_child_nodes(node):
            for target, value in _bindings(child):
                if self.carries(value):
                    self.names.update(_bound(target))
                if isinstance(target, ast.Name):
                    if self._made_with(value):
                        self.objects.add(target.id)
                    if (kind := self.type_of(value)) is not None:
                        self.types[target.id] = kind
                    if (found := self._resolved(value)) is not None:
                        self.late[target.id] = found
            if isinstance(child, ast.Call):
                self._enter(child, visits)
            self.follow(child, visits)

    def _enter(self, call: ast.Call, visits: dict[str, None]) -> None:
        called = self.callee(call.func)
        if called is None:
            return
        (source, node), owner = called
        receives = isinstance(call.func, ast.Attribute) and self._receives(call.func.value)
        carrying: set[str] = set()
        if isinstance(node, ast.ClassDef):
            if not any(map(self.carries, _arguments(call))):
                return
            owner = source, node
            made = self._method(owner, "__init__") or self._method(owner, "__post_init__")
            if made is None:
                return
            source, node = made[0]
            carrying = {"self"} if node.name == "__post_init__" else set()
        names = [one.arg for one in _parameters(node)]
        if owner is not None:
            carrying |= {names[0]} if receives else set()
            names = names[1:]
        for place, value in enumerate(call.args):
            if self.carries(value):
                carrying.update(names[place:] if isinstance(value, ast.Starred) else names[place : place + 1])
        carrying |= {word.arg for word in call.keywords if word.arg is not None and self.carries(word.value)}
        if carrying:
            _visit(self.tree, visits, (source, node), owner, carrying)

    def carries(self, value: ast.AST | None) -> bool:
        """Whether a value carries the parameter."""
        if isinstance(value, ast.Name):
            return value.id in self.names
        if isinstance(value, ast.Call):
            if self.callee(value.func) is not None or getattr(value.func, "id", "") in SCALARS:
                return False
            return self.carries(value.func) or any(map(self.carries, _arguments(value)))
        parts = (getattr(value, field) for field in PARTS.get(type(value), ()))
        return any(any(map(self.carries, part)) if isinstance(part, list) else self.carries(part) for part in parts)

    def _made_with(self, value: ast.AST | None) -> bool:
        """Whether a value is an object of ours that is constructed with what carries the parameter."""
        if not isinstance(value, ast.Call) or (called := self.callee(value.func)) is None:
            return False
        return isinstance(called[0][1], ast.ClassDef) and any(map(self.carries, _arguments(value)))

    def _receives(self, value: ast.expr) -> bool:
        known = isinstance(value, ast.Name) and value.id in self.objects
        return known or self._made_with(value) or self.carries(value)

    def callee(self, function: ast.expr) -> tuple[Found, Found | None] | None:
        """Returns the function or class of ours that is called, and the class whose method it is."""
        if (found := self._resolved(function)) is not None:
            return found, None
        if isinstance(function, ast.Name):
            named = self.late.get(function.id) or self.tree.lookup(self.source.module, function.id)
            return (named, None) if isinstance(named, tuple) else None
        if not isinstance(function, ast.Attribute):
            return None
        base, name = function.value, function.attr
        if isinstance(base, ast.Call) and getattr(base.func, "id", "") == "super" and self.owner is not None:
            above = (self._method(one, name) for one in _bases(self.tree, self.owner))
            return next((one for one in above if one is not None), None)
        if (kind := self.type_of(base)) is not None:
            return self._method(kind, name)
        named = self.tree.lookup(self.source.module, base.id) if isinstance(base, ast.Name) else None
        if isinstance(named, Source):
            inner = self.tree.lookup(named.module, name)
            return (inner, None) if isinstance(inner, tuple) else None
        return self._method(named, name) if named is not None and isinstance(named[1], ast.ClassDef) else None

    def _resolved(self, value: ast.AST | None) -> Found | None:
        match value:
            case ast.Call(func=ast.Name(id="resolve"), args=[ast.Constant(value=str(name))]):
                found = self.tree.lookup(*name.split(":"))
            case ast.Call(func=ast.Name(id="resolve"), args=[ast.Attribute(attr=field)]):
                found = self.tree.lookup(*self.tree.of_text.get(field, ":").split(":"))
            case _:
                return None
        return found if isinstance(found, tuple) else None

    def type_of(self, value: ast.AST | None) -> Found | None:
        """Returns the class of ours that a value is an object of, as far as the text says so."""
        match value:
            case ast.Name(id=name):
                return self.types.get(name)
            case ast.Attribute():
                kind = self.type_of(value.value)
                return None if kind is None else _attribute(self.tree, kind, value.attr)
            case ast.IfExp():
                return self.type_of(value.body) or self.type_of(value.orelse)
            case ast.Call() if (called := self.callee(value.func)) is not None:
                (source, node), owner = called
                if isinstance(node, ast.ClassDef):
                    return source, node
                returns = _annotated(self.tree, node.returns, source)
                return owner if getattr(node.returns, "id", "") == "Self" else returns
        return None

    def _method(self, kind: Found, name: str) -> tuple[Found, Found] | None:
        node = next((one for one in kind[1].body if isinstance(one, Function) and one.name == name), None)
        if node is not None:
            return (kind[0], node), kind
        above = (self._method(one, name) for one in _bases(self.tree, kind))
        return next((one for one in above if one is not None), None)


def _bases(tree: Tree, kind: Found) -> list[Found]:
    assert isinstance(kind[1], ast.ClassDef)
    named = (_annotated(tree, base, kind[0]) for base in kind[1].bases)
    return [one for one in named if one is not None and one != kind]


def _attribute(tree: Tree, kind: Found, name: str) -> Found | None:
    """Returns the class of an attribute: annotated in the class, a property, or set from a parameter of `__init__`."""
    for node in kind[1].body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == name:
            return _annotated(tree, node.annotation, kind[0])
        if isinstance(node, Function) and node.name == name:
            return _annotated(tree, node.returns, kind[0])
        if isinstance(node, Function) and node.name == "__init__":
            body = _Body(tree, kind[0], kind, set(), _parameter_types(tree, (kind[0], node), None))
            for target, value in (pair for one in ast.walk(node) for pair in _bindings(one)):
                if isinstance(target, ast.Attribute) and target.attr == name:
                    return body.type_of(value)
    return next((found for base in _bases(tree, kind) if (found := _attribute(tree, base, name)) is not None), None)


def _annotated(tree: Tree, annotation: ast.AST | None, source: Source) -> Found | None:
    """Returns the class of ours that an annotation names, by itself or beside None."""
    match annotation:
        case ast.Constant(value=str(text)):
            return _annotated(tree, ast.parse(text, mode="eval").body, source)
        case ast.BinOp():
            return _annotated(tree, annotation.left, source) or _annotated(tree, annotation.right, source)
        case ast.Name(id=name):
            found = tree.lookup(source.module, name)
            return found if isinstance(found, tuple) and isinstance(found[1], ast.ClassDef) else None
    return None


def _parameters(node: Definition) -> list[ast.arg]:
    assert isinstance(node, Function)
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(word.value for word in call.keywords)]


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yields what a node binds, with the values."""
    match node:
        case ast.Assign():
            yield from ((target, node.value) for target in node.targets)
        case ast.AnnAssign() | ast.NamedExpr():
            yield node.target, node.value
        case ast.For() | ast.comprehension():
            yield node.target, node.iter
        case ast.withitem() if node.optional_vars is not None:
            yield node.optional_vars, node.context_expr


def _bound(target: ast.expr) -> Iterator[str]:
    """Yields the names that hold a value after it was assigned to `target`: x of x, x.y and x[i]."""
    match target:
        case ast.Name(id=name):
            yield name
        case ast.Attribute() | ast.Subscript() | ast.Starred():
            yield from _bound(target.value)
        case ast.Tuple() | ast.List():
            for one in target.elts:
                yield from _bound(one)
