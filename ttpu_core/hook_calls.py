"""Asks hooks, and says of a failure which hook failed, and where in the plugin's source."""

from __future__ import annotations

import ast
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ttpu_core import hookspecs
from ttpu_core.config import ModelConfig
from ttpu_core.errors import PluginError, TTPUError
from ttpu_core.mapping import FlaxMapping
from ttpu_core.spec import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    MixerSpec,
    MLPSpec,
    MoESpec,
    NormSpec,
)
from ttpu_core.spec.rope import RopeSpec

HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("ttpu_"))
"""The names of all hooks."""

ANSWERS: dict[str, tuple[type, ...]] = {
    "ttpu_config": (ModelConfig,),
    "ttpu_embedding": (EmbeddingSpec,),
    "ttpu_head": (HeadSpec,),
    "ttpu_norm": (NormSpec,),
    "ttpu_final_norm": (NormSpec, type(None)),
    "ttpu_block": (BlockSpec,),
    "ttpu_attention": (AttentionSpec,),
    "ttpu_rope": (RopeSpec,),
    "ttpu_mixer": (MixerSpec, type(None)),
    "ttpu_mlp": (MLPSpec, MoESpec, type(None)),
    "ttpu_flax_mapping": (FlaxMapping,),
}
"""What a hook may answer, of those with one answer."""

_CORE = str(Path(__file__).parent)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


class HookCalls:
    """The hooks of a manager (`pluggy.HookRelay`), to be called in the same way.

    What a hook raises becomes a `PluginError` with hook, file and line. Errors that are sentences already
    (`TTPUError`) are passed on, with `hook` and `place` set. An answer of a type that the hook must not return,
    or with a field that holds none of its choices, is a `PluginError` too."""

    def __init__(self, relay: Any, plugin: str) -> None:
        self._relay, self._plugin = relay, plugin

    def __getattr__(self, name: str) -> Callable[..., Any]:
        caller = getattr(self._relay, name)

        def call(**arguments: Any) -> Any:
            try:
                answer = caller(**arguments)
            except TTPUError as error:
                if error.hook is None:
                    error.hook, error.place = name, place_of(error)
                raise
            except Exception as error:
                text = " ".join(str(error).split())
                where = f" in layer {arguments['layer']}" if "layer" in arguments else ""
                missing = getattr(error, "name", None)  # of a NameError or AttributeError
                correct = missing if missing in HOOKS else name
                raised = PluginError(
                    f"`{name}` of {self._plugin} was asked about {_source(arguments)}{where}, but it raised "
                    f"{type(error).__name__}{': ' * bool(text)}{text} ({place_of(error) or 'place unknown'}): correct "
                    f"`{correct}`."
                )
                raised.hook, raised.place = correct, place_of(error)
                raise raised from error
            return self._checked(name, answer)

        return call

    def _checked(self, name: str, answer: Any) -> Any:
        wanted = ANSWERS.get(name)
        if wanted is None or isinstance(answer, wanted):
            for kind, field, value, choices in _unknown_choices(answer):
                raised = PluginError(
                    f"`{name}` of {self._plugin} returned {kind}({field}={value!r}), but {field} is one of "
                    f"{', '.join(map(repr, choices))}: correct `{name}`."
                )
                raised.hook = name
                raise raised
            return answer
        allowed = " or ".join(kind.__name__ for kind in wanted).replace("NoneType", "None")
        raised = PluginError(
            f"`{name}` of {self._plugin} returned a {type(answer).__name__}, but it must return a {allowed}: correct "
            f"`{name}`."
        )
        raised.hook = name
        raise raised


def _unknown_choices(answer: Any) -> Iterator[tuple[str, str, Any, tuple[Any, ...]]]:
    """Yield the fields of an answer, and of the values inside it, that hold none of the choices that their type lists:
    class, field, value and choices."""
    if not is_dataclass(answer) or isinstance(answer, FlaxMapping | ModelConfig | type):
        return
    choices = _choices(type(answer))
    for field in fields(answer):
        value = getattr(answer, field.name)
        if field.name in choices and value not in choices[field.name]:
            yield type(answer).__name__, field.name, value, choices[field.name]
        yield from _unknown_choices(value)


@cache
def _choices(kind: type) -> dict[str, tuple[Any, ...]]:
    """The values that each field of a class may have, of those whose type is a `Literal`."""
    names, found = vars(sys.modules[kind.__module__]), {}
    for field in fields(kind):
        hint: Any = names.get(field.type, field.type) if isinstance(field.type, str) else field.type
        if isinstance(hint, str) and hint.startswith("Literal[") and hint.count("[") == 1 and hint.endswith("]"):
            found[field.name] = tuple(ast.literal_eval(f"({hint[len('Literal[') : -1]},)"))
        elif get_origin(hint) is Literal:
            found[field.name] = get_args(hint)
    return found


def _source(arguments: dict[str, Any]) -> str:
    """The name of the config that a hook was asked about."""
    config = arguments.get("config")
    return config.source if isinstance(config, ModelConfig) else "a config"


def place_of(error: BaseException) -> str:
    """Return `folder/file.py:line` of the innermost frame in a plugin's source, in a default answer of the core if no
    plugin takes part, or "" without either."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if _is_of_a_plugin(frame.filename):
            return short_place(frame)
    for frame in reversed(frames):
        if frame.name in HOOKS:
            return short_place(frame)
    return ""


def _is_of_a_plugin(file: str) -> bool:
    if "site-packages" in file or "dist-packages" in file:
        return "pluggy" not in Path(file).parts and not file.startswith(_CORE)
    return not file.startswith((_CORE, _STANDARD_LIBRARY, "<"))


def short_place(frame: traceback.FrameSummary) -> str:
    """The frame's file, with its folder if that is a package, and line."""
    path = Path(frame.filename)
    package = path.parent.name + "/" if (path.parent / "__init__.py").exists() else ""
    return f"{package}{path.name}:{frame.lineno}"
