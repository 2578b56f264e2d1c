"""No module of a package imports another that, directly or not, imports it back. Imports inside functions count;
imports for annotations alone do not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted([ROOT / "ttpu_core", *ROOT.glob("plugins/*/ttpu_*"), ROOT / "conformance" / "ttpu_conformance"])

Graph = dict[str, set[str]]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_no_circle_in_a_package(package: Path) -> None:
    graph = imports(package)
    assert len(graph) >= 1
    assert circles(graph) == []


def test_a_circle_through_a_function_is_found(tmp_path: Path) -> None:
    package = tmp_path / "house"
    (package / "room").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "room" / "__init__.py").write_text("from house.room.bed import sleep\n")
    (package / "room" / "bed.py").write_text("def sleep():\n    from house import hall\n    return hall\n")
    (package / "hall.py").write_text("import house.door\n")
    (package / "door.py").write_text(
        "from typing import TYPE_CHECKING\nfrom house.room import bed\nif TYPE_CHECKING:\n    from house import attic\n"
    )
    (package / "attic.py").write_text("from house import door\n")
    # hall → door → room (bed is a module of it) → bed → hall
    assert circles(imports(package)) == [["house.door", "house.hall", "house.room.bed"]]


def imports(package: Path) -> Graph:
    """Module → the modules of the same package that it imports."""
    files = {name_of(package, path): path for path in package.rglob("*.py")}
    return {
        name: {target for target in imported(ast.parse(path.read_text()), set(files)) if target != name}
        for name, path in files.items()
    }


def name_of(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(node: ast.AST, known: set[str]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from imported(other, known)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                below = f"{child.module}.{alias.name}"
                if (found := below if below in known else child.module or "") in known:
                    yield found
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name in known)
        else:
            yield from imported(child, known)


def circles(graph: Graph) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan, SIAM J. Comput. 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for target in graph[name]:
            if target not in order:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], order[target])
        if low[name] == order[name]:
            component = []
            while True:
                component.append(stack.pop())
                if component[-1] == name:
                    break
            if len(component) > 1:
                found.append(sorted(component))

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return sorted(found)
