"""How a fault is planted: an edit of one function's source, or another value of a table or constant.

A mutant is a readable change of today's code. `Edit` names a function and the text in it that is replaced;
the module is compiled with the change, and the code of the function that exists already is swapped for the
new one, so that tables, from-imports and bound methods see it too. `Item` changes one entry of a dictionary,
`Constant` a value of a module or of an object in it. Everything is put back at the end.

Text that has drifted away from the code is an error that names the mutant: a fault that is not planted would
otherwise look like one that is not found.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

ABSENT: Final = object()
"""As the value of an `Item`: the entry is taken out."""

Undo = Callable[[], None]


class DriftError(AssertionError):
    """A mutant does not fit today's code."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces `old` by `new` in the source of one function.

    `target` is `module:qualified.name`, as in `kvferry.protocol.sources:Delivery.next_range`; a property is
    named like a method. `old` must occur exactly once in the text of the function, from its `def` on, as it
    stands in the file, indentation included. Names that `new` uses must be known in that module.
    """

    target: str
    old: str
    new: str

    def plant(self) -> Undo:
        """Swap the function's code; returns what puts it back.

        Raises:
            DriftError: the function, or the text in it, is not there, or the change changes nothing.
        """
        module, name = _split(self.target)
        function = _function(module, name)
        before = function.__code__
        if _essence(_compiled(module, name, self.old, self.old)) != _essence(before):
            raise DriftError(f"{self.target} has changed since it was imported")
        code = _compiled(module, name, self.old, self.new)
        if _essence(code) == _essence(before):
            raise DriftError(f"{self.target}: the edit changes nothing that runs")
        unknown = sorted(_globals_of(code) - function.__globals__.keys() - vars(_builtins()).keys())
        if unknown:
            raise DriftError(f"{self.target}: {', '.join(unknown)} is not known there")
        function.__code__ = code

        def undo() -> None:
            function.__code__ = before

        return undo


@dataclass(frozen=True, slots=True)
class Item:
    """Gives one entry of a dictionary another value, `ABSENT` for none.

    `target` is `module:path.to.dictionary`, as in `kvferry.protocol.states:PART.transitions`.
    """

    target: str
    key: Any
    value: Any

    def plant(self) -> Undo:
        """Change the entry; returns what puts it back.

        Raises:
            DriftError: there is no such dictionary, or the change changes nothing.
        """
        module, path = _split(self.target)
        table: dict[Any, Any] = _look_up(module, path)
        before = table.get(self.key, ABSENT)
        if before is self.value or before == self.value:
            raise DriftError(f"{self.target}: entry {self.key!r} has this value already")
        whole = dict(table)
        _put(table, self.key, self.value)

        def undo() -> None:
            # In the order that it had: the protocol's page is generated from it.
            table.clear()
            table.update(whole)

        return undo


@dataclass(frozen=True, slots=True)
class Constant:
    """Gives a name another value, in its module and in every kvferry module that has imported it.

    For `module:OBJECT.attribute` it is the attribute of that object. `value` takes the old value and returns
    the new one.
    """

    target: str
    value: Callable[[Any], Any]

    def plant(self) -> Undo:
        """Change the value; returns what puts it back.

        Raises:
            DriftError: there is no such name, or the change changes nothing.
        """
        module, path = _split(self.target)
        owner_path, _, name = path.rpartition(".")
        owner = _look_up(module, owner_path) if owner_path else module
        before = _look_up(module, path)
        after = self.value(before)
        if after == before:
            raise DriftError(f"{self.target} has this value already")
        owners = [owner] if owner_path else _who_has(name, before)
        for each in owners:
            setattr(each, name, after)

        def undo() -> None:
            for each in owners:
                setattr(each, name, before)

        return undo


Change = Edit | Item | Constant


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault that can be planted. `promise` is the number of the promise that it breaks first of all."""

    name: str
    promise: str
    what: str
    """The fault, in a sentence for people."""
    changes: Sequence[Change]
    blind: bool = False
    """Planted without having looked at the checkers."""
    world: str = ""
    """The world whose histories can show it; empty: the one that was asked for."""

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Plant the fault into this process for as long as the context lasts.

        Raises:
            DriftError: it does not fit today's code; the text names the mutant.
        """
        with contextlib.ExitStack() as undo:
            targets = [change.target for change in self.changes if isinstance(change, Edit)]
            if len(set(targets)) < len(targets):
                raise DriftError(f"mutant {self.name!r} has two edits of one function: make them one")
            for change in self.changes:
                try:
                    undo.callback(change.plant())
                except DriftError as error:
                    raise DriftError(f"mutant {self.name!r} does not fit: {error}") from None
            yield


# --- finding things ------------------------------------------------------------------------------


def _split(target: str) -> tuple[ModuleType, str]:
    module, colon, name = target.partition(":")
    if not colon:
        raise DriftError(f"{target}: say module:name")
    try:
        return importlib.import_module(module), name
    except ImportError as error:
        raise DriftError(f"{target}: {error}") from None


def _look_up(module: ModuleType, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        try:
            found = vars(found)[name] if isinstance(found, type) else getattr(found, name)
        except (AttributeError, KeyError):
            raise DriftError(f"{module.__name__} has no {path}") from None
    return found


def _function(module: ModuleType, name: str) -> FunctionType:
    """The function itself, of a property or a class method too."""
    found = _look_up(module, name)
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if not isinstance(found, FunctionType):
        raise DriftError(f"{module.__name__}:{name} is no function")
    return found


def _who_has(name: str, value: object) -> list[ModuleType]:
    """Modules of kvferry in which `name` is this very object, once imported by all that use it."""
    return [
        module
        for key, module in sorted(sys.modules.items())
        if key.startswith("kvferry.") and vars(module).get(name, ABSENT) is value
    ]


def _builtins() -> ModuleType:
    return importlib.import_module("builtins")


def _put(table: dict[Any, Any], key: Any, value: Any) -> None:
    if value is ABSENT:
        table.pop(key, None)
    else:
        table[key] = value


# --- compiling -----------------------------------------------------------------------------------


def _compiled(module: ModuleType, name: str, old: str, new: str) -> CodeType:
    """The code of a function of the module, with the change in it."""
    path = str(module.__file__)
    source = Path(path).read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    first, past = _extent(ast.parse(source), module, name)
    text = "".join(lines[first:past])
    if (count := text.count(old)) != 1:
        raise DriftError(f"{module.__name__}:{name} has {old!r} {count} times, not once")
    changed = "".join([*lines[:first], text.replace(old, new), *lines[past:]])
    try:
        whole = compile(changed, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise DriftError(f"{module.__name__}:{name}: {error}") from None
    for code in _nested(whole):
        if code.co_qualname == name:
            return code
    raise DriftError(f"{module.__name__}:{name} is gone after the edit")


def _extent(tree: ast.Module, module: ModuleType, name: str) -> tuple[int, int]:
    """First line and past the last line of a function, from 0."""
    node: ast.AST = tree
    for part in name.split("."):
        inside = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.name == part
        ]
        if len(inside) != 1:
            raise DriftError(f"{module.__name__} has {len(inside)} {name}")
        node = inside[0]
    assert isinstance(node, ast.FunctionDef)
    assert node.end_lineno is not None
    return node.lineno - 1, node.end_lineno


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def _essence(code: CodeType) -> tuple[object, ...]:
    """What a code object does, without where it stands."""
    constants = tuple(_essence(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts)
    return (code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)


def _globals_of(code: CodeType) -> set[str]:
    """Names that the code, or code in it, looks up in its module."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*(_globals_of(inner) for inner in _nested(code)))
