"""Tries the kit on deliberate mistakes: mutants of family plugins' modules are run against its checks, each until the
first failure. `python -m ttpu_conformance.mutation results.json` writes how many were caught, whether the failure named
the hook, and which survived; a run that was stopped goes on where it was."""

from __future__ import annotations

import ast
import json
import linecache
import logging
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ttpu_conformance.automatic import knobs, over
from ttpu_conformance.case import Case, Options, Reference, cases_of
from ttpu_conformance.checks.knobs import rounds_alike
from ttpu_conformance.config_forms import Form, forms
from ttpu_conformance.config_reading import SIZE
from ttpu_conformance.declaration import Variant
from ttpu_conformance.mutants import Mutant, mutants
from ttpu_conformance.runner import outcome
from ttpu_conformance.selection import Item, all_checks
from ttpu_conformance.session import prepare
from ttpu_core.architecture import Architecture
from ttpu_core.config import ModelConfig
from ttpu_core.plugin_records import ARCHITECTURES
from ttpu_core.registry import Registry, default_registry

IN_ANOTHER_PROCESS = ("imports_no_framework", "description_is_deterministic")
"""Checks that read the plugin's files in another process, where there is no mutant."""
OF_NUMBERS = ("float32_logits", "windows_are_passed", "bfloat16_casts", "bfloat16_keys", "bfloat16_logits",
              "cached_decode", "greedy_tokens", "checkpoint_round_trip", "ignored_tensors_do_not_matter")  # fmt: skip
MAY_BE_REFUSED = 0
"""In place of a digest, where a plugin refuses what it may refuse."""
OF_SHARDING = ("sharded_fsdp", "sharded_tensor", "sharded_experts")
HOOKS = (
    "config|embedding|head|norm|final_norm|block|attention|rope|mixer|mlp|flax_mapping|sharding_rules|torch_patches"
    "|kernels"
)
SHIPPED = ("ttpu_gemma", "ttpu_llama", "ttpu_mistral", "ttpu_qwen", "ttpu_zoo")


@dataclass(frozen=True)
class Found:
    """What became of a mutant: the check that failed first, for which case, and its reason; None where all passed, and
    then for which types the mutant describes another model than the plugin, if for any."""

    check: str | None
    case: str = ""
    reason: str = ""
    differs: str = ""


@dataclass
class Family:
    """A package of family plugins: its files by module, its model types by module, and what its types describe as they
    are."""

    package: str
    files: dict[str, Path]
    types: dict[str, str]
    originals: dict[tuple[str, str], Any] = field(default_factory=dict)
    references: dict[tuple[str, str], Reference] = field(default_factory=dict)
    configs: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    plain: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def named(cls, package: str) -> Family:
        """The family of an installed package."""
        spec = find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        folder = Path(spec.submodule_search_locations[0])
        files = {f"{package}.{file.stem}": file for file in sorted(folder.glob("*.py")) if file.stem != "__init__"}
        records = default_registry().plugins(ARCHITECTURES)
        types = {r.name: r.value for r in records if r.usable and r.value.partition(".")[0] == package}
        return cls(package, files, types)

    def mutants(self) -> Iterator[Mutant]:
        """Yield every mutant of every module."""
        for module, file in self.files.items():
            if self.types_of(module):  # a module of no installed entry point is tried by nothing
                yield from mutants(module, file, self.files.values())

    def types_of(self, module: str) -> list[str]:
        """Return the model types that a module takes part in, those first whose hooks it holds."""
        using = {one for one in self.files if module in self._imported(one)}
        own = [name for name, value in self.types.items() if value == module]
        return own + [name for name, value in self.types.items() if value in using and value != module]

    def _imported(self, module: str) -> set[str]:
        """The package's modules that a module imports, by whatever way."""
        seen: set[str] = set()
        todo = [module]
        while todo:
            tree = ast.parse(self.files[todo.pop()].read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                    new = {name for name in names if name in self.files} - seen
                    seen |= new
                    todo += new
        return seen

    def registry(self) -> Registry:
        """A registry that imports the package anew."""
        return Registry([EntryPoint(name, value, ARCHITECTURES) for name, value in self.types.items()])

    def digests_as_it_is(self, model_type: str) -> list[int]:
        """What the plugin describes for every config that the checks make; asked without a mutant."""
        if model_type not in self.plain:
            registry = self.registry()
            made: dict[str, str] = {}
            for case in cases_of(model_type, registry=registry):
                kept = self.case(registry, case, case.variant)
                for form in [*forms(kept), *_published(kept), *(_settings(self, kept) if kept.is_base else ())]:
                    made.setdefault(json.dumps(form.raw, sort_keys=True), f"{kept.name}, {form.what}")
            self.configs[model_type] = [(what, raw) for raw, what in made.items()]
            self.plain[model_type] = self.digests(registry, model_type)
        return self.plain[model_type]

    def digests(self, registry: Registry, model_type: str) -> list[int]:
        """A digest of each of these descriptions, or of the error that refuses the config."""
        return [_digest(registry, raw) for _, raw in self.configs[model_type]]

    def case(self, registry: Registry, plain: Case, variant: Variant) -> Case:
        """A case whose reference is kept from mutant to mutant."""
        made = Case(registry, plain.declaration, variant, plain.options)
        made.reference = self.references.setdefault((plain.model_type, variant.name), made.reference)
        return made


def _differ(now: list[int], were: list[int]) -> bool:
    return any(one not in (other, MAY_BE_REFUSED) for one, other in zip(now, were, strict=True))


class _Mutated(MetaPathFinder, Loader):
    """Finds one module, whose source it is given."""

    def __init__(self, mutant: Mutant, file: Path) -> None:
        self.mutant, self.file = mutant, file

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname == self.mutant.module else None

    def exec_module(self, module: Any) -> None:
        source = self.mutant.source
        linecache.cache[str(self.file)] = (len(source), None, source.splitlines(keepends=True), str(self.file))
        exec(compile(source, str(self.file), "exec"), module.__dict__)


@contextmanager
def imported_with(mutant: Mutant, family: Family) -> Iterator[None]:
    """Have the mutant in place of its module, for all that imports the package meanwhile."""
    package = family.package
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == package}
    finder = _Mutated(mutant, family.files[mutant.module])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        linecache.cache.pop(str(finder.file), None)
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
        sys.modules.update(kept)


def _digest(registry: Registry, raw: str) -> int:
    """A digest of what is described for a config, and of the keys that nobody reads; `MAY_BE_REFUSED` where the plugin
    asks for a size that the config lacks."""
    try:
        config = ModelConfig.from_dict(json.loads(raw))
        found = registry.architecture(config, ())
        return hash((repr(found.spec), found.mapping, config.keys_unread()))
    except Exception as error:  # a mutant may raise anything
        missing = re.search(r"has no '(?:text_config\.)?(\w+)'", str(error))
        if missing is not None and SIZE.fullmatch(missing[1]):
            return MAY_BE_REFUSED
        return hash(type(error).__name__)  # another sentence describes no other model


def _published(case: Case) -> Iterator[Form]:
    for one in case.declaration.published if case.is_base else ():
        yield Form(one.config.name, json.loads(one.config.read_text(encoding="utf-8")))


def _settings(family: Family, case: Case) -> Iterator[Form]:
    """The config of every setting of `every_knob` that the config class accepts."""
    if case.wraps_text_model:
        return
    for knob in knobs(case):
        for setting in knob.settings:
            for start in case.declaration.variants:
                variant = over(start, setting)
                with suppress(Exception):  # refused by transformers
                    yield Form(variant.name, family.case(case.registry, case, variant).reference.config)


def described(case: Case) -> Architecture | str:
    """What a case's plugin describes, or by which error it refuses."""
    try:
        return case.describe(case.config())
    except Exception as error:  # a mutant may raise anything
        return f"{type(error).__name__}: {error}"


def first_failure(family: Family, mutant: Mutant) -> Found:
    """Run the kit against a mutant until a check fails. Numbers are computed only where the mutant describes another
    architecture than the plugin, since equal ones give equal numbers."""
    types = family.types_of(mutant.module)
    plain = {name: cases_of(name, registry=family.registry()) for name in types}
    for name, cases in plain.items():
        for case in cases:
            key = (name, case.variant.name)
            if key not in family.originals:
                kept = family.case(case.registry, case, case.variant)
                family.originals[key] = described(kept)
    with imported_with(mutant, family):
        registry = family.registry()
        for name in types:
            found = _of_contract(family, registry, plain[name])
            if found.check is not None:
                return found
    were = {name: family.digests_as_it_is(name) for name in types}
    with imported_with(mutant, family):
        registry = family.registry()
        differing = [name for name in types if _differ(family.digests(registry, name), were[name])]
        for name in differing:
            found = _of_knobs(family, plain[name][0], family.case(registry, plain[name][0], plain[name][0].variant))
            if found.check is not None:
                return found
    return Found(None, differs=", ".join(differing))


def _of_contract(family: Family, registry: Registry, plain: list[Case]) -> Found:
    """The contract checks of all variants, then numbers of those that are described otherwise than by the plugin."""
    checks = all_checks()
    cases = [family.case(registry, case, case.variant) for case in plain]
    for case in cases:
        for check in checks.values():
            if check.level == "contract" and check.id not in IN_ANOTHER_PROCESS and check.applies_to(case, "full"):
                found = outcome(Item(check, case, case.expected_failure(check.id)))
                if found.status == "failed":
                    return Found(check.id, case.name, found.reason)
    for case in cases:
        original = family.originals[case.model_type, case.variant.name]
        now = described(case)
        if _same(original, now):
            continue
        other_axes = (
            not isinstance(now, str)
            and not isinstance(original, str)
            and original.spec.parameter_axes != now.spec.parameter_axes
        )
        for name in OF_NUMBERS + (OF_SHARDING if other_axes else ()):
            check = checks[name]
            if check.applies_to(case, "full"):
                found = outcome(Item(check, case, case.expected_failure(name)))
                if found.status == "failed":
                    return Found(name, case.name, found.reason)
    return Found(None)


def _of_knobs(family: Family, plain: Case, case: Case) -> Found:
    """The settings of `every_knob` for which the mutant describes another model than the plugin does."""
    if case.wraps_text_model:
        return Found(None)
    check = all_checks()["float32_logits"]
    for knob in knobs(family.case(plain.registry, plain, plain.variant)):
        for setting in knob.settings:
            for start in case.declaration.variants:
                variant = over(start, setting)
                changed = family.case(case.registry, case, variant)
                if not _accepted(changed):
                    continue
                original = family.originals.get((case.model_type, variant.name))
                if original is None:
                    with _as_it_is(family):
                        original = described(family.case(family.registry(), plain, variant))
                    family.originals[case.model_type, variant.name] = original
                now = described(changed)
                if _same(original, now) or isinstance(now, str):
                    continue
                if isinstance(original, str) or not _runs(changed):
                    continue
                found = outcome(Item(check, changed, None))
                if found.status == "failed" and not rounds_alike(changed):
                    return Found("every_knob", changed.name, found.reason)
    return Found(None)


def _accepted(case: Case) -> bool:
    """Whether transformers reads a case's config."""
    try:
        return bool(case.reference.config)
    except Exception:  # of many kinds
        return False


def _runs(case: Case) -> bool:
    """Whether transformers' model of a case gives logits."""
    try:
        return bool(np.isfinite(case.reference.logits).all())
    except Exception:  # of many kinds
        return False


@contextmanager
def _as_it_is(family: Family) -> Iterator[None]:
    """Have the package without the mutant for a moment."""
    finder = sys.meta_path.pop(0)
    mutated = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == family.package}
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == family.package]:
            del sys.modules[name]
        sys.modules.update(mutated)
        sys.meta_path.insert(0, finder)


def _same(one: Architecture | str, other: Architecture | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return repr(one.spec) == repr(other.spec) and one.mapping == other.mapping


def hooks_named(reason: str) -> tuple[str, ...]:
    """Return the hooks that a failure asks to correct: those after "correct" or "in", else all that it mentions."""
    corrected = re.findall(r"correct ((?:`ttpu_\w+`(?:, | and |, then )?)+)", reason)
    return tuple(dict.fromkeys(re.findall(rf"ttpu_(?:{HOOKS})\b", " ".join(corrected) or reason)))


def summary(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return counts over all mutants: killed, and of those the failures that named the hook."""
    killed = [one for one in results.values() if one["check"] is not None]
    by_check: dict[str, int] = defaultdict(int)
    for one in killed:
        by_check[one["check"]] += 1
    return {
        "mutants": len(results),
        "killed": len(killed),
        "survived, and describes another model": sum(bool(one["differs"]) for one in results.values()),
        "hook named alone": sum(one["exact"] for one in killed),
        "hook named": sum(one["named"] for one in killed),
        "by check": dict(sorted(by_check.items(), key=lambda item: -item[1])),
        "seconds": round(sum(one["seconds"] for one in results.values())),
    }


def chosen(families: list[Family], seed: int) -> Iterator[tuple[Family, Mutant]]:
    """Yield all mutants in an order that takes one of each module in turn, the same for each seed."""
    lists = []
    for family in families:
        by_module: dict[str, list[Mutant]] = defaultdict(list)
        for mutant in family.mutants():
            by_module[mutant.module].append(mutant)
        for module, members in sorted(by_module.items()):
            random.Random(f"{seed} {module}").shuffle(members)
            lists.append((family, members))
    for index in range(max(len(members) for _, members in lists)):
        for family, members in lists:
            if index < len(members):
                yield family, members[index]


def main(
    file: Annotated[Path, typer.Argument(help="JSON results; a run goes on where the file ends.")],
    packages: Annotated[str, typer.Option(help="Packages of families, with commas.")] = ",".join(SHIPPED),
    most: Annotated[int, typer.Option(help="How many mutants.")] = 250,
    seed: Annotated[int, typer.Option(help="Which mutants.")] = 0,
    minutes: Annotated[float, typer.Option(help="Stop after so many minutes.")] = 1e9,
) -> None:
    """Run mutants of family plugins against the kit's checks."""
    prepare(Options())
    logging.getLogger("ttpu").setLevel(logging.ERROR)
    began = time.perf_counter()
    results: dict[str, dict[str, Any]] = json.loads(file.read_text())["mutants"] if file.exists() else {}
    for number, (family, mutant) in enumerate(chosen([Family.named(one) for one in packages.split(",")], seed)):
        if number >= most or time.perf_counter() - began > 60 * minutes:
            break
        if mutant.id in results:
            continue
        start = time.perf_counter()
        try:
            found = first_failure(family, mutant)
        except Exception as error:  # a mutant may raise anything
            found = Found("stumbled", "", f"{type(error).__name__}: {error}")
        named = hooks_named(found.reason)
        results[mutant.id] = {
            "change": mutant.change,
            "hooks": mutant.hooks,
            "check": found.check,
            "case": found.case,
            "named": bool(set(named) & set(mutant.hooks)),
            "exact": bool(named) and set(named) <= set(mutant.hooks),
            "reason": found.reason,
            "differs": found.differs,
            "seconds": round(time.perf_counter() - start, 1),
        }
        content = {"summary": summary(results), "mutants": results}
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        one = results[mutant.id]
        status = one["check"] or f"SURVIVED {one['differs']}"
        print(f"{number} {status} {one['seconds']} s {one['exact']} {mutant.id}", flush=True)
    print(json.dumps(summary(results), indent=1))


if __name__ == "__main__":
    typer.run(main)
