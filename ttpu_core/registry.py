"""Finds plugins by entry points and turns a config into an `Architecture`. Finding reads distribution metadata and
imports nothing; a plugin is imported when its model type is asked for, and one that is broken, built for another core,
or claims a taken name is shown with its reason and never stops the others."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pluggy

from ttpu_core import defaults, distributions, hookspecs
from ttpu_core.architecture import Architecture, describe
from ttpu_core.config import ModelConfig
from ttpu_core.errors import MissingDependencyError, PluginError, TTPUError, UnsupportedError
from ttpu_core.plugin_records import (
    ARCHITECTURES,
    BACKENDS,
    COMMANDS,
    DEFAULT_BACKENDS,
    DENY_VARIABLE,
    FALLBACKS,
    GROUPS,
    LAUNCHES,
    PACKS_VARIABLE,
    PATCH_PACKS,
    SERVICES,
    PluginRecord,
    installed_entry_points,
    names_in,
    scan,
    sentence,
)

if TYPE_CHECKING:
    from ttpu_core.backend import Backend, Fallback, Launches


class Registry:
    """The plugins of one environment."""

    def __init__(self, entry_points: Iterable[metadata.EntryPoint] | None = None) -> None:
        """Scan `entry_points`, or all installed distributions."""
        found = list(scan(installed_entry_points() if entry_points is None else entry_points))
        self._entry_points = {record.key: point for point, record in found}
        self._records = {record.key: record for _, record in found}

    def plugins(self, group: str | None = None, *, check: bool = False) -> tuple[PluginRecord, ...]:
        """Every plugin that was found, or those of one group, sorted by group, distribution and name; `check` imports
        them first."""
        if check:
            for record in list(self._records.values()):
                if record.usable and group in (None, record.group):
                    try:
                        self._load(record)
                    except TTPUError:
                        continue  # the reason is in the record
        records = [record for record in self._records.values() if group in (None, record.group)]
        return tuple(sorted(records, key=lambda r: (GROUPS.index(r.group), r.distribution, r.name)))

    def model_types(self) -> tuple[str, ...]:
        """Model types that a usable plugin describes."""
        return tuple(sorted({r.name for r in self._records.values() if r.group == ARCHITECTURES and r.usable}))

    def architecture(
        self, config: ModelConfig, patch_packs: str | Sequence[str] | None = None, *, tensors: int | None = None
    ) -> Architecture:
        """Describe a model.

        Args:
            config: the model's config.
            patch_packs: names of installed packs, applied in order, the last one winning: a sequence, or one string
                with commas; None takes those of the environment variable TTPU_PATCH_PACKS.
            tensors: number of tensors in the checkpoint; None if only the config is there.

        Raises:
            PluginError: no usable plugin for `config.model_type`, or no such pack.
            UnsupportedError: the model has an encoder and a decoder.
            ConfigError, MappingError: see `ttpu_core.architecture.describe`.
        """
        asked = os.environ.get(PACKS_VARIABLE, "") if patch_packs is None else patch_packs
        asked = names_in(asked) if isinstance(asked, str) else asked
        if not self.is_described(config.model_type):
            refuse_encoder(config)
        names = list(dict.fromkeys(reversed(asked)))[::-1]  # a pack that is named twice is applied where it is last
        family = self._find(ARCHITECTURES, config.model_type, "model type")
        packs = [self._find(PATCH_PACKS, name, "patch pack") for name in names]
        manager = _new_manager()
        manager.register(defaults, "ttpu-core")
        for record in (family, *packs):
            self._register(manager, record, self._load(record))
        return describe(
            manager.hook,
            config,
            family=f"{family.distribution} {family.version}",
            patch_packs=tuple(f"{record.name} ({record.distribution} {record.version})" for record in packs),
            tensors=tensors,
        )

    def backend(self, name: str | None = None) -> Backend[Any]:
        """An instance of a backend; None takes the default, see `default_backend`.

        Raises:
            MissingDependencyError: the backend's distribution is not installed.
            PluginError: it is there but cannot be used.
        """
        name = self.default_backend() if name is None else name
        known = self._claimed(BACKENDS)
        if name not in known:
            raise MissingDependencyError(
                f"backend {name!r} was asked for, but the installed backends are: {', '.join(known) or 'none'}; "
                f"{_backend_advice(name, known)}"
            )
        return self._load(self._find(BACKENDS, name, "backend"))()

    def default_backend(self) -> str:
        """The backend that runs a model where none is named: the only usable one; of several one that offers itself by
        an entry point of the group `ttpu.default_backends`; of several of those the first by name. Imports nothing.

        Raises:
            MissingDependencyError: no backend is installed.
        """
        usable = sorted({record.name for record in self.plugins(BACKENDS) if record.usable})
        offered = {record.name for record in self.plugins(DEFAULT_BACKENDS) if record.usable}
        found = [name for name in usable if name in offered] or usable or self._claimed(BACKENDS)
        if not found:
            raise MissingDependencyError(
                f"a model was to be run, but no backend is installed: {_backend_advice('', ())}"
            )
        return found[0]

    def launches(self, backend: str) -> Launches | None:
        """What a backend declares for `ttpu launch`, or None if it declares nothing. Imports no framework.

        Raises:
            PluginError: the declaration cannot be imported, or two distributions claim it.
        """
        if backend not in self._claimed(LAUNCHES):
            return None
        found: Launches = self._load(self._find(LAUNCHES, backend, "the launch of backend"))
        return found

    def is_described(self, model_type: str) -> bool:
        """Whether a plugin claims a model type; one that the user excludes does not, one that is broken does."""
        return any(
            (record.group, record.name) == (ARCHITECTURES, model_type) and record.state != "disabled"
            for record in self._records.values()
        )

    def fallback(self, backend: str) -> Fallback | None:
        """What runs models that no plugin describes on a backend, or None if nothing does.

        Raises:
            PluginError: it cannot be imported, or two distributions claim it.
        """
        if not any(record.name == backend and record.usable for record in self.plugins(FALLBACKS)):
            return None
        found: Fallback = self._load(self._find(FALLBACKS, backend, "the fallback of backend"))()
        return found

    def service(self, name: str) -> Any:
        """What another distribution does for backends and commands: "planner" (`ttpu_core.services.Planner`),
        "rendezvous" (`ttpu_core.services.Rendezvous`), "engine" or "harness" (`ttpu_core.services.Harness`).

        Raises:
            MissingDependencyError: no installed distribution brings it.
            PluginError: the one that does cannot be used.
        """
        if name not in self._claimed(SERVICES):
            source = distributions.SERVICES.get(name)
            raise MissingDependencyError(
                f"the {name} was asked for, but no installed distribution brings it: "
                + (f"`pip install {source}`." if source else "`ttpu list-plugins` shows what is installed.")
            )
        return self._load(self._find(SERVICES, name, "the service"))

    def names(self, group: str) -> tuple[str, ...]:
        """The names in a group that the environment does not exclude, sorted; those that are broken, or that two
        distributions claim, are among them. Imports nothing."""
        records = [record for record in self._records.values() if record.group == group]
        return tuple(sorted({record.name for record in records if record.state != "disabled"}))

    def load(self, group: str, name: str, what: str) -> Any:
        """Import what an entry point names; `what` is its kind in errors, such as "the tool parser".

        Raises:
            PluginError: there is none of this name, it cannot be imported, or two distributions claim it.
        """
        return self._load(self._find(group, name, what))

    def command(self, name: str) -> Any:
        """The function or Typer app of a command that a plugin adds."""
        return self._load(self._find(COMMANDS, name, "command"))

    def _claimed(self, group: str) -> list[str]:
        return sorted({record.name for record in self._records.values() if record.group == group})

    def _find(self, group: str, name: str, what: str) -> PluginRecord:
        candidates = [record for record in self._records.values() if (record.group, record.name) == (group, name)]
        usable = [record for record in candidates if record.usable]
        if len(usable) == 1:
            return usable[0]
        if candidates:
            candidates.sort(key=lambda record: (record.state in ("disabled", "superseded"), record.distribution))
            record = candidates[0]  # what is disabled, or yields to another, explains least
            subject = "" if record.state == "conflict" else f"{record.distribution} is {record.state}: "
            reason = subject + record.reason
            raise PluginError(f"{what} {name!r} was asked for, but {reason}")
        known = sorted({record.name for record in self._records.values() if record.group == group and record.usable})
        without = ""
        fallbacks = [record for record in self._records.values() if record.group == FALLBACKS and record.usable]
        if group == ARCHITECTURES and fallbacks:
            without = (
                ", and without one transformers' own code generates, is served and is planned, but is not quantized or "
                "trained (begin a plugin with `ttpu new-plugin --from CONFIG`)"
            )
        raise PluginError(
            f"{what} {name!r} was asked for, but no installed plugin serves it{without}; the ones that exist are: "
            f"{', '.join(known) or 'none'}; {_advice(group, name, has_fallback=bool(without))}"
        )

    def _load(self, record: PluginRecord) -> Any:
        """Import an entry point, noting what came of it."""
        try:
            loaded = self._entry_points[record.key].load()
        except (Exception, SystemExit) as error:  # a plugin may fail in any way, and must not take the others along
            reason = f"importing {record.value!r} failed with {type(error).__name__}: {error}"
            self._records[record.key] = replace(record, state="broken", reason=sentence(reason))
            raise PluginError(
                f"{record.name!r} needs the plugin {record.distribution} {record.version}, but {sentence(reason)} "
                f"Reinstall or update {record.distribution}, or exclude it with {DENY_VARIABLE}={record.distribution}."
            ) from error
        if record.group in (ARCHITECTURES, PATCH_PACKS) and record.state != "loaded":
            self._register(_new_manager(), record, loaded)
        self._records[record.key] = replace(record, state="loaded", reason="")
        return loaded

    def _register(self, manager: pluggy.PluginManager, record: PluginRecord, plugin: Any) -> None:
        """Register hooks, refusing ones that this core does not know or that ask for other arguments."""
        try:
            manager.register(plugin, f"{record.distribution}:{record.name}")
            manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:  # ValueError: registered under another name already
            reason = f"its hooks do not fit ttpu-core {metadata.version('ttpu-core')}: {error}"
            self._records[record.key] = replace(record, state="incompatible", reason=sentence(reason))
            raise PluginError(
                f"the plugin {record.distribution} {record.version} for {record.name!r} cannot be used: "
                f"{sentence(reason)} Update {record.distribution} or ttpu-core."
            ) from error


@lru_cache(maxsize=1)
def default_registry() -> Registry:
    """The registry of this process's environment, scanned once."""
    return Registry()


class _HookManager(pluggy.PluginManager):
    """Takes a plugin's own hooks, and none that it lost or borrowed by accident."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """What pluggy knows of one attribute of a plugin; None if it is not a hook."""
        if plugin is defaults:
            return super().parse_hookimpl_opts(plugin, name)
        function = getattr(plugin, name, None)
        if getattr(function, "__module__", None) == defaults.__name__:
            return None  # imported in order to be called: it must not answer in the family's place
        options = super().parse_hookimpl_opts(plugin, name)
        if options is None and name.startswith("ttpu_") and inspect.isroutine(function):
            raise pluggy.PluginValidationError(plugin, f"{name!r} is not marked as a hook: write @hookimpl above it")
        return options


def _new_manager() -> pluggy.PluginManager:
    manager = _HookManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _advice(group: str, name: str, *, has_fallback: bool) -> str:
    if group == ARCHITECTURES:
        distribution = distributions.family_of(name)
        if distribution:
            return f"`pip install {distribution}`, or update it, if it describes this type."
        plugin = "`pip install` a plugin that describes this type (`ttpu list-plugins` shows what is installed)"
        if has_fallback:
            return f"{plugin}."
        return f"{plugin}, or `pip install {distributions.A_FALLBACK}`, which runs transformers' models without one."
    return "`ttpu list-plugins` shows what is installed."


def _backend_advice(name: str, known: Sequence[str]) -> str:
    if name in distributions.BACKENDS:
        return f"`pip install {distributions.BACKENDS[name]}` brings it."
    return "use one of those." if known else f"`pip install {distributions.A_BACKEND}` brings one."


def refuse_encoder(config: ModelConfig) -> None:
    """Refuse a model that no plugin describes and whose config says that it has an encoder and a decoder.

    Raises:
        UnsupportedError: it has both.
    """
    if config.flag("is_encoder_decoder", default=False):
        raise UnsupportedError(
            f"{config.source} of model_type {config.model_type!r} has an encoder and a decoder, but TTPU runs decoders "
            "and encoders alone: use transformers for it."
        )
