"""`ModelConfig`: a frozen, hashable view of a model's config.json. Its typed readers refuse values of the wrong
kind."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from ttpu_core.config.json_object import describe, parse_json_object
from ttpu_core.config.kinds import KINDS, instance_of, integers, numbers, positive_integer, positive_number
from ttpu_core.errors import ConfigError

T = TypeVar("T")
D = TypeVar("D")
KeyPath = tuple[str, ...]
"""Names of keys from the whole config down to one value. An index of a list is a name too."""

_REQUIRED: Any = object()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ModelConfig:
    """A read-only config.json. Create one with `from_dict` or `from_file`, not with the constructor.

    A null counts as absent everywhere. Lists are returned as tuples and objects as `ModelConfig`, so that every
    value is hashable. Two configs are equal if their JSON content is equal; the file and the keys that were read do
    not matter."""

    _values: dict[str, Any]
    _content: str  # canonical JSON; unlike Python's == it tells true from 1
    _source: str
    _family: str | None  # the model_type for error messages; a section inherits its parent's
    _path: KeyPath  # () for the whole config, ("text_config",) for a section
    _read: set[KeyPath]  # shared by a config, its sections and all configs derived from it
    _without_effect: dict[KeyPath, str]  # why these keys cannot matter; shared in the same way

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], source: str = "config.json") -> "ModelConfig":
        """A config of JSON values: None, booleans, numbers, strings, lists or tuples, and mappings of these.
        `source` names the config in error messages.

        Raises:
            ConfigError: `mapping` is not a mapping, is nested too deeply, or holds a value that JSON cannot write.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(
                f"{source} was asked for as a model config, but it is {describe(mapping)} where a mapping from keys "
                "to values is needed: pass what config.json holds."
            )
        try:
            return _freeze_mapping(mapping, source, None, (), set(), {})
        except RecursionError:
            raise ConfigError(
                f"{source} was asked for as a model config, but it is nested too deeply to be read: "
                "take the config.json that the checkpoint was published with."
            ) from None

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """The config in a JSON file.

        Raises:
            ConfigError: the file is missing, unreadable, or not one JSON object.
        """
        path = Path(path)
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{path} was asked for as a model config, but it cannot be read ({error.strerror}): "
                "pass a readable config.json file."
            ) from None
        try:
            return cls.from_dict(parse_json_object(raw), source=str(path))
        except ValueError as problem:
            raise ConfigError(
                f"{path} was asked for as a model config, but it {problem}: correct the file, "
                "or take the config.json that the checkpoint was published with."
            ) from None

    @property
    def source(self) -> str:
        """The file name for error messages."""
        return self._source

    @property
    def model_type(self) -> str:
        """The architecture's name. Plugins are found by this name.

        Raises:
            ConfigError: the key is missing, or its value is not a valid name.
        """
        name = self.text("model_type")
        if not name:
            raise self._refused("model_type", name, "an architecture's name such as 'llama'")
        return name

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` where it is absent or null."""
        self._read.add((*self._path, key))
        value = self._values.get(key)
        return default if value is None else value

    @overload
    def require(self, key: str) -> Any: ...
    @overload
    def require(self, key: str, kind: type[T]) -> T: ...
    def require(self, key: str, kind: Any = None) -> Any:
        """The value of `key`, which must be present. `kind` is int, float, bool, str, tuple or ModelConfig.

        A bool is not an int, an int is accepted as a float, and a float must be finite.

        Raises:
            ConfigError: the key is absent, or its value is of another kind.
        """
        wanted, convert = _KINDS[kind]
        return self._typed(key, wanted, convert, _REQUIRED)

    @overload
    def positive_int(self, key: str) -> int: ...
    @overload
    def positive_int(self, key: str, default: D) -> int | D: ...
    def positive_int(self, key: str, default: Any = _REQUIRED) -> Any:
        """An integer above zero."""
        return self._typed(key, "a positive integer", positive_integer, default)

    @overload
    def number(self, key: str) -> float: ...
    @overload
    def number(self, key: str, default: D) -> float | D: ...
    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A finite number, as a float."""
        return self._typed(key, *_KINDS[float], default)

    @overload
    def positive_number(self, key: str) -> float: ...
    @overload
    def positive_number(self, key: str, default: D) -> float | D: ...
    def positive_number(self, key: str, default: Any = _REQUIRED) -> Any:
        """A finite number above zero, as a float."""
        return self._typed(key, "a number above zero", positive_number, default)

    @overload
    def flag(self, key: str) -> bool: ...
    @overload
    def flag(self, key: str, default: D) -> bool | D: ...
    def flag(self, key: str, default: Any = _REQUIRED) -> Any:
        """A boolean: true or false, not 0, 1 or "true"."""
        return self._typed(key, *_KINDS[bool], default)

    @overload
    def text(self, key: str) -> str: ...
    @overload
    def text(self, key: str, default: D) -> str | D: ...
    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        """A string."""
        return self._typed(key, *_KINDS[str], default)

    @overload
    def items(self, key: str) -> tuple[Any, ...]: ...
    @overload
    def items(self, key: str, default: D) -> tuple[Any, ...] | D: ...
    def items(self, key: str, default: Any = _REQUIRED) -> Any:
        """A list of any values, as a tuple."""
        return self._typed(key, *_KINDS[tuple], default)

    @overload
    def int_list(self, key: str) -> tuple[int, ...]: ...
    @overload
    def int_list(self, key: str, default: D) -> tuple[int, ...] | D: ...
    def int_list(self, key: str, default: Any = _REQUIRED) -> Any:
        """A list of integers, as a tuple."""
        return self._typed(key, "a list of integers", integers, default)

    @overload
    def number_list(self, key: str) -> tuple[float, ...]: ...
    @overload
    def number_list(self, key: str, default: D) -> tuple[float, ...] | D: ...
    def number_list(self, key: str, default: Any = _REQUIRED) -> Any:
        """A list of finite numbers, as a tuple of floats."""
        return self._typed(key, "a list of numbers", numbers, default)

    @overload
    def converted(self, key: str, wanted: str, convert: Callable[[Any], T]) -> T: ...
    @overload
    def converted(self, key: str, wanted: str, convert: Callable[[Any], T], default: D) -> T | D: ...
    def converted(self, key: str, wanted: str, convert: Callable[[Any], Any], default: Any = _REQUIRED) -> Any:
        """A value that `convert` returns in another form, or refuses by a ValueError.

        `wanted` says in an error what is needed, as in "a list of two positive integers"."""
        return self._typed(key, wanted, convert, default)

    def section(self, key: str) -> "ModelConfig | None":
        """The object under `key` (text_config, rope_parameters), or None if it is absent or null."""
        return self._typed(key, *_KINDS[ModelConfig], None)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ModelConfig":
        """This config with `defaults` for the keys that it does not write. Reads of the result also count for this
        config.

        A key that is written as null stays null, as in transformers: `"sliding_window": null` means no window
        although the class's default is one."""
        return self.with_values({key: value for key, value in defaults.items() if key not in self._values})

    def with_values(self, values: Mapping[str, Any]) -> "ModelConfig":
        """This config with `values` in place of what it writes for these keys. Reads of the result also count for
        this config. A multimodal parent sets values of its text part this way."""
        shared = self._read, self._without_effect
        changed = _freeze_mapping(values, self._source, self._family, self._path, *shared)
        return _assemble(self._values | changed._values, self._source, changed._family, self._path, *shared)

    def with_renamed(self, names: Mapping[str, str]) -> "ModelConfig":
        """This config with the values of other key names under the usual ones. `names` holds the usual name by other
        name, like `attribute_map` of a config class, and like there the other name wins if a file writes both. Reads
        of the result also count for this config."""
        return self.with_values({usual: self.get(other) for other, usual in names.items() if other in self})

    def does_not_matter(self, keys: str | Iterable[str], *, because: str) -> "ModelConfig":
        """This config, of which some keys cannot change what the model computes: derived from other keys, written by
        old files, or without effect in transformers. They count as read, with everything inside them.

        Args:
            keys: names of keys, whether the file writes them or not; dotted inside a section (`attn_config.alibi`).
            because: the reason, in a few words, for whoever reads the plugin or `ttpu info --json`.

        Raises:
            ValueError: no reason was given.
        """
        if not because.strip():
            raise ValueError(f"{keys!r} were said not to matter without a reason: pass because=...")
        for key in (keys,) if isinstance(keys, str) else keys:
            for names in ((key,), tuple(key.split("."))):  # a dot may be in the name of a key, or lead into a section
                self._without_effect[(*self._path, *names)] = because
        return self

    @property
    def keys_without_effect(self) -> dict[str, str]:
        """The keys with a value that `does_not_matter` was told of and nobody read, and why. Keys inside a section are
        dotted."""
        start = len(self._path)
        told = [(path, why) for path, why in self._without_effect.items() if path not in self._read]
        found = {path[start:]: why for path, why in told if path[:start] == self._path}
        return {dotted(path): why for path, why in sorted(found.items()) if self.value_at(path) is not None}

    @property
    def keys_read(self) -> frozenset[str]:
        """The keys that were read. Keys inside a section are dotted (`rope_parameters.rope_theta`)."""
        start = len(self._path)
        return frozenset(dotted(path[start:]) for path in self._read if path[:start] == self._path and path[start:])

    def keys_unread(self) -> tuple[str, ...]:
        """The keys with a value that were not read, sorted. Keys inside a section that was read are dotted.

        Call it on the checkpoint's own config, which shares its reads with all derived configs. A result of
        `with_defaults` also lists the keys that were filled in."""
        return tuple(map(dotted, self.paths_unread()))

    def paths_unread(self) -> tuple[KeyPath, ...]:
        """The keys of `keys_unread` as paths, in which the name of a key may have a dot."""
        return tuple(sorted((path[len(self._path) :] for path in _unread(self)), key=dotted))

    def value_at(self, path: KeyPath) -> Any:
        """The value under a path below this config, or None if there is none. Does not count as a read."""
        value: Any = self
        for name in path:
            if isinstance(value, ModelConfig):
                value = value._values.get(name)
            elif isinstance(value, tuple) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                return None
        return value

    def to_dict(self) -> dict[str, Any]:
        """A fresh dict of plain JSON values, nulls included. Does not count as a read."""
        return dict(json.loads(self._content))

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return self._content == other._content if isinstance(other, ModelConfig) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content)

    def __repr__(self) -> str:
        named = sorted(self._values.items(), key=lambda item: item[0] != "model_type")
        shown = [f"{key}={value!r}" for key, value in named if isinstance(value, str | int | float)][:8]
        if len(self._values) > len(shown):
            shown.append(f"and {len(self._values) - len(shown)} more")
        return f"ModelConfig({', '.join(shown)}; from {self._source})"

    def _typed(self, key: str, wanted: str, convert: Callable[[Any], Any], default: Any) -> Any:
        value = self.get(key)
        if value is None and default is not _REQUIRED:
            return default
        try:
            if value is not None:
                return convert(value)
        except (ValueError, OverflowError):
            pass
        raise self._refused(key, value, wanted)

    def _refused(self, key: str, value: Any, wanted: str) -> ConfigError:
        of = f" of model_type {self._family!r}" if self._family else ""
        plain = value.to_dict() if isinstance(value, ModelConfig) else value
        name = dotted((*self._path, key))
        found = f"sets {name!r} to {describe(plain)}"
        if key not in self._values:
            found = f"has no {name!r}"
        return ConfigError(
            f"{self._source}{of} {found}, but {wanted} is needed there: write one into the file, "
            "or take the config.json that the checkpoint was published with."
        )


def _freeze_mapping(
    mapping: Mapping[Any, Any],
    source: str,
    family: str | None,
    path: KeyPath,
    read: set[KeyPath],
    without_effect: dict[KeyPath, str],
) -> ModelConfig:
    own = mapping.get("model_type")
    family = own if isinstance(own, str) and own else family

    def freeze(value: Any, path: KeyPath) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            return tuple(freeze(item, (*path, str(index))) for index, item in enumerate(value))
        if isinstance(value, ModelConfig):
            value = value.to_dict()
        if isinstance(value, Mapping):
            return _freeze_mapping(value, source, family, path, read, without_effect)
        raise ConfigError(
            f"{source} sets {dotted(path)!r} to {describe(value)}, but a config holds only null, booleans, numbers, "
            "strings, lists and objects: pass the value as config.json would write it."
        )

    # JSON writes the integer keys of an id2label as strings; a mapping made in Python may hold integers.
    values = {str(key): freeze(value, (*path, str(key))) for key, value in mapping.items()}
    return _assemble(values, source, family, path, read, without_effect)


def _assemble(
    values: dict[str, Any],
    source: str,
    family: str | None,
    path: KeyPath,
    read: set[KeyPath],
    without_effect: dict[KeyPath, str],
) -> ModelConfig:
    content = json.dumps(values, sort_keys=True, default=ModelConfig.to_dict)
    return ModelConfig(values, content, source, family, path, read, without_effect)


def dotted(path: KeyPath) -> str:
    """A path in one word, for people."""
    return ".".join(path)


def _unread(value: Any) -> Iterator[KeyPath]:
    """Whole paths below a section, or below a list of sections, that hold a value and were not read."""
    if isinstance(value, tuple):
        for item in value:
            yield from _unread(item)
    elif isinstance(value, ModelConfig):
        for key, child in value._values.items():
            path = (*value._path, key)
            if path in value._without_effect:
                continue
            if path in value._read:
                yield from _unread(child)
            elif child is not None:
                yield path


_KINDS = {**KINDS, ModelConfig: ("an object", instance_of(ModelConfig))}
