"""Checks what public docstrings state: the shape of every array argument and result, every error that is raised, and an
`Args:` section for functions of five or more parameters. A method that refers to the protocol of `ttpu_core.backend`
which it implements has its shapes and arguments documented there; rows of the fallback's table of ATen operations have
ATen's.

Prints the share that is documented, by package, and fails on gaps that are not in `docstring_gaps.txt` beside this
script. `--write` writes that file anew, `--list` prints every gap.

    python scripts/check_docstrings.py ttpu_core plugins/ttpu-jax/ttpu_jax
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KINDS = ("shapes", "raises", "args")
KNOWN_GAPS = Path(__file__).with_name("docstring_gaps.txt")
MANY_PARAMETERS = 5

ARRAY = re.compile(r"\b(jax\.Array|np\.ndarray|numpy\.ndarray|torch\.Tensor)\b")
CONTAINER = re.compile(r"\b(Callable|Mapping|dict|Sequence|list|tuple|Iterable|Iterator|type)\b")
SHAPE = r"\[[^\[\]]*\]"
SAME = r"(the same shape|same shape|shaped like|shape of|shaped as|scalar|of any shape|any shape)"
PROTOCOL = re.compile(r"[Ss]ee\s+`ttpu_core\.backend\.\w+`")
NOT_REPORTED = {"AssertionError", "NotImplementedError", "StopIteration", "SystemExit", "KeyboardInterrupt", "Exit"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Finding:
    """One thing that a docstring has to state, and whether it does."""

    kind: str
    place: str
    subject: str
    stated: bool

    def __str__(self) -> str:
        return f"{self.place} {self.kind} {self.subject}"


def main() -> int:
    """Check the folders that the command line names; the result is the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", type=Path, help="package folders, or single modules")
    parser.add_argument("--list", action="store_true", help="print every gap")
    parser.add_argument("--write", action="store_true", help="write the gaps that there are to docstring_gaps.txt")
    arguments = parser.parse_args()
    found = {package: list(findings(package)) for package in arguments.packages}
    print_shares(found)
    gaps = sorted({str(one) for each in found.values() for one in each if not one.stated})
    if arguments.write:
        KNOWN_GAPS.write_text("".join(f"{gap}\n" for gap in gaps), encoding="utf-8")
        return 0
    known = set(KNOWN_GAPS.read_text(encoding="utf-8").splitlines()) if KNOWN_GAPS.exists() else set()
    new = [gap for gap in gaps if gap not in known]
    for gap in gaps if arguments.list else new:
        print(gap)
    if new:
        print(f"{len(new)} new gaps in public docstrings: state what each line names.")
    return int(bool(new))


def print_shares(found: dict[Path, list[Finding]]) -> None:
    """Print a line for each package and one for all."""
    total: Counter[tuple[str, bool]] = Counter()
    for package, each in found.items():
        counts = Counter((one.kind, one.stated) for one in each)
        total += counts
        print(f"{package!s:44} {_shares(counts)}")
    print(f"{'all':44} {_shares(total)}")


def _shares(counts: Counter[tuple[str, bool]]) -> str:
    parts = []
    for kind in KINDS:
        stated, missing = counts[kind, True], counts[kind, False]
        share = f"{stated / (stated + missing):4.0%}" if stated + missing else "   –"
        parts.append(f"{kind} {share} ({stated}/{stated + missing})")
    return "  ".join(parts)


def findings(package: Path) -> Iterator[Finding]:
    """What every public function below a folder, or in one module, has to state."""
    for path in [package] if package.is_file() else sorted(package.rglob("*.py")):
        if any(part.startswith("_") and part != "__init__.py" for part in path.parts):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, function, owner in public_functions(tree):
            place = f"{path.as_posix()}:{name}"
            for kind, subject, stated in requirements(function, owner):
                yield Finding(kind, place, subject, stated)


def public_functions(tree: ast.Module) -> Iterator[tuple[str, Function, ast.ClassDef | None]]:
    """Public functions and methods of a module with their names, and the class of a method."""
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_") and not _is_row(node):
            yield node.name, node, None
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for item in node.body:
                named = isinstance(item, Function) and (not item.name.startswith("_") or item.name in _CONSTRUCTORS)
                if named and isinstance(item, Function) and not _is_overload(item):
                    yield f"{node.name}.{item.name}", item, node


_CONSTRUCTORS = ("__init__", "__post_init__", "__call__")


def requirements(function: Function, owner: ast.ClassDef | None) -> Iterator[tuple[str, str, bool]]:
    """Kind, subject, and whether the docstring states it. A constructor's docstring may be its class's."""
    text = ast.get_docstring(function) or ""
    elsewhere = PROTOCOL.search(text) is not None
    if owner is not None and function.name in _CONSTRUCTORS:
        text = f"{ast.get_docstring(owner) or ''}\n{text}"
    parameters = [
        each
        for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if each.arg not in ("self", "cls")
    ]
    for each in parameters:
        if _is_array(each.annotation):
            yield "shapes", each.arg, elsewhere or _has_shape(text, each.arg)
    if _is_array(function.returns):
        yield "shapes", "the result", elsewhere or re.search(f"{SHAPE}|{SAME}", text) is not None
    for error in sorted(_raised(function)):
        yield "raises", error, "Raises:" in text and (error == "…" or error in text.split("Raises:", 1)[1])
    if len(parameters) >= MANY_PARAMETERS and not _is_command(function, parameters):
        yield "args", f"{len(parameters)} parameters", elsewhere or "Args:" in text


def _is_array(annotation: ast.expr | None) -> bool:
    if annotation is None:
        return False
    text = ast.unparse(annotation).strip("'\"")
    return ARRAY.search(text) is not None and CONTAINER.search(text) is None


def _has_shape(text: str, name: str) -> bool:
    """Whether a shape, or the word that it is another's, follows the name within its sentence."""
    return re.search(rf"\b{re.escape(name)}\b`?[^.\[\]]{{0,120}}?({SHAPE}|{SAME})", text, re.DOTALL) is not None


def _raised(function: Function) -> set[str]:
    """Names of the error classes that the body raises; "…" for one that another function makes."""
    names: set[str] = set()
    for node in _own_nodes(function):
        if not isinstance(node, ast.Raise) or node.exc is None:
            continue
        made = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        name = made.attr if isinstance(made, ast.Attribute) else made.id if isinstance(made, ast.Name) else "…"
        if name in NOT_REPORTED:
            continue
        is_class = name[:1].isupper() and name.endswith(("Error", "Exception"))
        names.add(name if is_class else "…")
    return names


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes of a body without those of functions inside it."""
    stack: list[ast.AST] = list(function.body)
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.Lambda)):
            stack.extend(ast.iter_child_nodes(node))


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _is_command(function: Function, parameters: list[ast.arg]) -> bool:
    """Whether the parameters carry their own help, as Typer's commands do."""
    grouped = any("with_option_groups" in ast.unparse(each) for each in function.decorator_list)
    annotations = [ast.unparse(each.annotation) for each in parameters if each.annotation is not None]
    return grouped or any("typer." in each for each in annotations)


def _is_overload(function: Function) -> bool:
    return any("overload" in ast.unparse(decorator) for decorator in function.decorator_list)


def _is_row(function: Function) -> bool:
    """Whether it is a row of the fallback's table of operations, whose shapes and arguments are ATen's."""
    return any(ast.unparse(each).startswith("operation(") for each in function.decorator_list)


if __name__ == "__main__":
    sys.exit(main())
