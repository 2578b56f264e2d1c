"""Says of an exception that nobody raised on purpose whose code it came from, where, and what to do: the plugin's own,
transformers', or the backend's and the kit's."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ttpu_conformance.case import Case
from ttpu_conformance.tiny import SIZES, SIZES_WHERE_ON, config_class
from ttpu_core.errors import TTPUError
from ttpu_core.hook_calls import HOOKS, short_place
from ttpu_core.spec import CustomSpec

SMALLEST_NUMBER = 3
"""Numbers below this one stand in messages for other things than sizes."""

PARTS = (
    ("mapping", "`ttpu_flax_mapping`"),
    ("rope", "`ttpu_rope`"),
    ("moe", "`ttpu_mlp`"),
    ("experts", "`ttpu_mlp`"),
    ("mlp", "`ttpu_mlp`"),
    ("norm", "`ttpu_norm`"),
    ("attention", "`ttpu_attention`"),
    ("mixer", "`ttpu_mixer`"),
    ("custom", "`ttpu_mixer` or `ttpu_block`"),
    ("embed", "`ttpu_embedding`"),
    ("head", "`ttpu_head`"),
)
"""Words in the names of a backend's modules, and the hooks that describe what they compute."""


def explained(error: Exception, case: Case) -> str:
    """One sentence about an exception that a check of this case met."""
    text = " ".join(str(error).split())[:400]
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if _is_in(frame.filename, plugin_folders(case))]
    if own:
        hook = next((frame.name for frame in reversed(frames) if frame.name in HOOKS), None)
        return (
            f"the plugin's own code raised {what} ({short_place(own[-1])}, in {own[-1].name}): correct "
            + (f"`{hook}`." if hook else "the implementation that `ttpu_mixer` or `ttpu_block` names.")
        )
    for path, named_by in implementations(case) if "architecture" in vars(case) else ():
        if re.search(rf"\b{re.escape(path.rpartition(':')[2])}\b", text):
            return f"calling {path}, which `{named_by}` names, raised {what}: give it the protocol's signature."
    theirs = [frame for frame in frames if "transformers" in Path(frame.filename).parts]
    if theirs:
        return (
            f"transformers itself raised {what} ({short_place(theirs[-1])}), with the reference model and without the "
            f"plugin. {_clash(case, text)}"
        )
    ours = [frame for frame in frames if any(part.startswith("ttpu_") for part in Path(frame.filename).parts)]
    place = short_place(ours[-1] if ours else frames[-1]) if frames else "place unknown"
    hooks = _hooks_of(ours)
    return (
        f"running the model that the plugin describes raised {what} ({place})"
        + (f": look at {hooks}." if hooks else ": run again with TTPU_TRACEBACK=1, which shows where.")
    )


def with_hook(error: TTPUError, case: Case) -> str:
    """The message of an error, and the hook that raised it where the message does not say so; of a key that the config
    has under another name, `ttpu_config`."""
    text = " ".join(str(error).split())
    missing = re.search(r"has no '(\w+)'", text)
    names = getattr(config_class(case.declaration), "attribute_map", {}) if missing else {}
    if missing and missing[1] in names:
        return (
            f"{text} transformers writes it as {names[missing[1]]!r}, and its class reads both: let `with_renamed` "
            "give it the usual one: correct `ttpu_config`."
        )
    part = case.reference.config.get("text_config") if missing else None
    if missing and isinstance(part, dict) and missing[1] in part and missing[1] not in case.reference.config:
        return f"{text} It is under 'text_config', which the helper `text_config` reads: correct `ttpu_config`."
    if error.hook is None or f"`{error.hook}`" in text:
        return text
    place = f" ({error.place})" if error.place else ""
    return f"{text} Raised in `{error.hook}`{place}."


def clashing_sizes(config: dict[str, Any], message: str) -> dict[str, int]:
    """The sizes of a config that a message names, by their keys or by their values."""
    sizes = dict(_sizes(config))
    named = {key: value for key, value in sizes.items() if re.search(rf"\b{re.escape(key)}\b", message)}
    numbers = {int(number) for number in re.findall(r"(?<![\w.])\d+(?![\w.]*\d)", message)}
    valued = {key: value for key, value in sizes.items() if value in numbers and value >= SMALLEST_NUMBER}
    return named | valued


def _clash(case: Case, message: str) -> str:
    try:
        config = case.reference.config
    except Exception:  # the config itself is what transformers refuses
        config = SIZES | SIZES_WHERE_ON
    found = clashing_sizes(config, message)
    where = f"[{case.model_type}.base]"
    if not found:
        kit = {key: value for key, value in _sizes(config) if key in SIZES | SIZES_WHERE_ON}
        return f"The tiny sizes are {_listed(kit)}: give others under {where} in conformance.toml."
    return f"Of the tiny sizes it concerns {_listed(found)}: give others under {where} in conformance.toml."


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sizes.items())


def _sizes(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _sizes(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield key, value


def implementations(case: Case) -> Iterator[tuple[str, str]]:
    """The import strings that the case's description names, and the hooks that name them."""
    spec = case.architecture.spec
    parts: list[tuple[Any, str]] = [(spec.embedding.custom, "ttpu_embedding")]
    for layer in spec.layers:
        parts += [(layer.mixer, "ttpu_mixer"), (layer.block.custom, "ttpu_block")]
    for part, hook in parts:
        if isinstance(part, CustomSpec):
            yield from ((path, hook) for _, path in part.implementations)


def plugin_folders(case: Case) -> list[str]:
    """Folders, or single files, that hold the sources of the case's plugins; it imports none of them."""
    folders = []
    for point in case.entry_points:
        top = point.value.partition(":")[0].partition(".")[0]
        try:
            found = find_spec(top)
        except (ImportError, ValueError):  # a module that a test made without a file
            continue
        if found is not None and found.submodule_search_locations:
            folders += list(found.submodule_search_locations)
        elif found is not None and found.origin:
            folders += [found.origin, found.origin.removesuffix(".py") + "_"]  # its parts lie beside it
    return folders


def _is_in(file: str, folders: list[str]) -> bool:
    return any(file == one or file.startswith(one if one.endswith("_") else f"{one}/") for one in folders)


def _hooks_of(frames: list[traceback.FrameSummary]) -> str:
    for frame in reversed(frames):
        for word, hook in PARTS:
            if word in Path(frame.filename).stem:
                return hook
    return ""
