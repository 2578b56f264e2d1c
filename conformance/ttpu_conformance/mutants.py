"""Makes deliberate mistakes in a plugin's modules: every literal, flag, keyword, comparison, hook and tensor name
changed in turn, in the syntax tree."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ttpu_core.config.key_audit import NOT_IN_THE_FORWARD_PASS

HOOK_PREFIX = "ttpu_"


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        id: module, line, column and kind; the same in every run over the same source.
        module: the module that it is in.
        kind: what was changed: number, flag, text, keyword, entry, comparison, arithmetic, branch, hook.
        change: the change in words.
        hooks: the hooks whose answers the changed code makes; one for code inside a hook.
        tree: makes the module's syntax tree with the mistake.
    """

    id: str
    module: str
    kind: str
    change: str
    hooks: tuple[str, ...]
    tree: Callable[[], ast.Module]

    @property
    def source(self) -> str:
        """The module's source with the mistake."""
        return ast.unparse(ast.fix_missing_locations(self.tree()))


def mutants(module: str, file: Path, package: Iterable[Path] = ()) -> Iterator[Mutant]:
    """Yield every mutant of a module; `package` are the files of its package, whose hooks may use what it defines."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    own, everywhere = _users(tree), dict[str, set[str]]()
    for one in package:
        for name, used in _users(ast.parse(one.read_text(encoding="utf-8"))).items():
            everywhere.setdefault(name, set()).update(used)
    for top in tree.body:
        if isinstance(top, ast.Import | ast.ImportFrom) or _is_text(top) or "__all__" in _defined(top):
            continue
        hooks = _hooks_of(top, own) or _hooks_of(top, everywhere)
        if isinstance(top, ast.FunctionDef) and top.name.startswith(HOOK_PREFIX):
            yield _made(module, top, "hook", f"without {top.name}", hooks, partial(_without, tree, top.name))
        for node in _sites(top):
            for kind, change, new in _changes(node):
                yield _made(module, node, kind, change, hooks, partial(_with, tree, node, new))


def _made(
    module: str, node: Any, kind: str, change: str, hooks: tuple[str, ...], tree: Callable[[], ast.Module]
) -> Mutant:
    name = f"{module}:{node.lineno}:{node.col_offset}:{kind}:{change}"
    return Mutant(name, module, kind, change, hooks, tree)


def _without(tree: ast.Module, function: str) -> ast.Module:
    changed = copy.deepcopy(tree)
    changed.body = [one for one in changed.body if getattr(one, "name", None) != function]
    return changed


def _sites(top: ast.AST) -> Iterator[Any]:
    """The nodes of a statement that may be changed: none of docstrings, errors, annotations and decorators."""
    for field, value in ast.iter_fields(top):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        if isinstance(top, ast.Dict):  # without what harmless keys hold
            pairs = zip(top.keys, top.values, strict=True)
            kept = [pair for pair in pairs if getattr(pair[0], "value", None) not in NOT_IN_THE_FORWARD_PASS]
            value = [pair[0 if field == "keys" else 1] for pair in kept]
        if isinstance(top, ast.keyword) and top.arg == "because":  # a reason in words
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Raise) or _is_text(child):
                continue
            if isinstance(child, ast.Assert):
                continue
            if hasattr(child, "lineno"):
                yield child
            yield from _sites(child)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OTHER: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.Pow: ast.Mult,
}  # fmt: skip


def _changes(node: Any) -> Iterator[tuple[str, str, Any]]:
    """The kind of each change of a node, the change in words, and the node in its place."""
    new: Any
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, bool):
            yield "flag", f"{not value} for {value}", ast.Constant(not value)
        elif isinstance(value, int):
            yield "number", f"{value + 1} for {value}", ast.Constant(value + 1)
        elif isinstance(value, float):
            double = 2 * value or 1.0
            yield "number", f"{double} for {value}", ast.Constant(double)
        elif isinstance(value, str) and value.strip() and value not in NOT_IN_THE_FORWARD_PASS:
            yield "text", f"{value + '_x'!r} for {value!r}", ast.Constant(value + "_x")
    elif isinstance(node, ast.Call):
        for index, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                new = copy.deepcopy(node)
                del new.keywords[index]
                yield "keyword", f"{ast.unparse(node.func)} without {keyword.arg}", new
    elif isinstance(node, ast.Dict) and len(node.keys) > 1:
        for index, key in enumerate(node.keys):
            if key is not None and getattr(key, "value", None) not in NOT_IN_THE_FORWARD_PASS:
                new = copy.deepcopy(node)
                del new.keys[index], new.values[index]
                yield "entry", f"a table without {ast.unparse(key)}", new
    elif isinstance(node, ast.Compare):
        new = copy.deepcopy(node)
        new.ops[0] = _OPPOSITE[type(node.ops[0])]()
        yield "comparison", f"{ast.unparse(new)} for {ast.unparse(node)}", new
    elif isinstance(node, ast.BinOp) and type(node.op) in _OTHER:
        new = copy.deepcopy(node)
        new.op = _OTHER[type(node.op)]()
        yield "arithmetic", f"{ast.unparse(new)} for {ast.unparse(node)}", new
    elif isinstance(node, ast.IfExp):
        new = copy.deepcopy(node)
        new.body, new.orelse = new.orelse, new.body
        yield "branch", f"{ast.unparse(new)} for {ast.unparse(node)}", new


def _with(tree: ast.Module, node: Any, new: Any) -> ast.Module:
    """A copy of the tree with another node at the place of `node`."""

    place = _place(node)

    class Change(ast.NodeTransformer):
        def visit(self, one: ast.AST) -> Any:
            if _place(one) == place:
                return ast.copy_location(copy.deepcopy(new), one)
            return self.generic_visit(one)

    changed: ast.Module = Change().visit(copy.deepcopy(tree))
    return changed


def _place(node: Any) -> tuple[Any, ...]:
    places = ("lineno", "col_offset", "end_lineno", "end_col_offset")
    return (type(node), *(getattr(node, name, None) for name in places))


def _users(tree: ast.Module) -> dict[str, set[str]]:
    """The names of top-level functions and values, each with the top-level names that it uses."""
    used: dict[str, set[str]] = {}
    for top in tree.body:
        names = {node.id for node in ast.walk(top) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(top) if isinstance(node, ast.Attribute)}  # of other modules
        for name in _defined(top):
            used[name] = names - {name}
    return used


def _defined(top: ast.stmt) -> list[str]:
    if isinstance(top, ast.FunctionDef | ast.ClassDef):
        return [top.name]
    targets = top.targets if isinstance(top, ast.Assign) else [top.target] if isinstance(top, ast.AnnAssign) else []
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _hooks_of(top: ast.stmt, users: dict[str, set[str]]) -> tuple[str, ...]:
    """The hooks that use what a statement defines, by whatever way; empty where only other modules do."""
    names = set(_defined(top))
    own = sorted(name for name in names if name.startswith(HOOK_PREFIX))
    if own:
        return tuple(own)
    while True:
        more = {name for name, used in users.items() if used & names and name not in names}
        if not more:
            break
        names |= more
    return tuple(sorted(name for name in names if name.startswith(HOOK_PREFIX)))
