"""Which modules of a model get low-rank adapters, and which parameters are trained whole beside them: what peft chooses
by the same settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.mapping import Concat, Expression, FlaxMapping, Padded, Stack, Tensor
from ttpu_core.mapping.padding import Padding
from ttpu_core.sharding.padding import Paddings
from ttpu_core.spec import ArchitectureSpec, Parameter
from ttpu_core.spec.parameters import stacked_parameters, stacked_paths
from ttpu_jax.params.adapter_sites import Site, is_reached, make_site, module_shape, reached_tensors
from ttpu_jax.train.held import pad

if TYPE_CHECKING:
    from ttpu_train.adapters import AdapterSettings

ALL_LINEAR = "all-linear"
WEIGHT, BIAS = ".weight", ".bias"
_EVERYWHERE: dict[str, Any] = {"exclude_modules": (), "modules_to_save": (), "layers_to_transform": None}


@dataclass(frozen=True)
class Block:
    """The adapters of one module in equal layers.

    Attributes:
        name: of its arrays; blocks of two kernels that are made of one module (queries and their gate) share them.
        role: the place of its tensor among those that the kernel is made of.
        layers: the places of the adapted layers in the stack.
        modules: their modules, as the checkpoint names them.
        outputs: of the module.
        inputs: of the module.
    """

    name: str
    role: int
    layers: tuple[int, ...]
    modules: tuple[str, ...]
    outputs: int
    inputs: int


@dataclass(frozen=True)
class Target:
    """A stacked kernel with adapters.

    Attributes:
        path: its stacked Flax path.
        parameter: its entry in the table, padded.
        copies: the paths of its layers.
        rules: how each layer's is made of checkpoint tensors.
        tensors: of each layer, by role.
        paddings: of each layer.
        blocks: the adapters.
    """

    path: str
    parameter: Parameter
    copies: tuple[str, ...]
    rules: tuple[Expression, ...]
    tensors: tuple[tuple[str, ...], ...]
    paddings: tuple[Padding | None, ...]
    blocks: tuple[Block, ...]

    @property
    def pads_inputs(self) -> bool:
        """Whether the mesh pads the inputs of the kernel."""
        return self._site(0, 1).padding is not None

    def outputs(self, values: Mapping[int, jax.Array], ranks: int) -> jax.Array:
        """[layers, *out, ranks] of the kernel, from role → [layers, out, ranks] of the modules; zeros for the others.
        For use inside jit."""

        def of(place: int, values: Mapping[int, jax.Array]) -> jax.Array:
            roles = {name: role for role, name in enumerate(self.tensors[place])}

            def read(leaf: Tensor) -> jax.Array:
                found = values.get(roles[leaf.name])
                return jnp.zeros(leaf.shape, next(iter(values.values())).dtype) if found is None else found

            return _made(self._site(place, ranks).rule, read)

        return self._each_layer(of, values)

    def inputs(self, a: jax.Array) -> jax.Array:
        """a [layers, ranks, in of the modules] padded as the kernel's inputs are: [layers, ranks, in]."""

        def of(place: int, a: jax.Array) -> jax.Array:
            padding = self._site(place, a.shape[0]).padding
            return a if padding is None else pad(a, padding)

        return self._each_layer(of, a)

    def _each_layer(self, of: Any, values: Any) -> jax.Array:
        if all(padding == self.paddings[0] for padding in self.paddings):
            result: jax.Array = jax.vmap(partial(of, 0))(values)
            return result
        layers = range(len(self.copies))
        return jnp.stack([of(place, jax.tree.map(lambda one, place=place: one[place], values)) for place in layers])

    def _site(self, place: int, ranks: int) -> Site:
        return make_site(self.path, self.tensors[place], self.rules[place], ranks, self.paddings[place])


def find_targets(
    settings: AdapterSettings, mapping: FlaxMapping, padded: ArchitectureSpec, paddings: Paddings
) -> tuple[Target, ...]:
    """The kernels that the settings give adapters.

    Args:
        settings: of the run.
        mapping: of the checkpoint, without padding.
        padded: the architecture as the mesh needs it.
        paddings: of the parameters of single layers.

    Raises:
        RequestError: a target that the model does not have.
        UnsupportedError: a target that adapters do not reach.
    """
    table, stacks = stacked_parameters(padded), dict(stacked_paths(padded, padded.parameters))
    rules = dict(mapping.rules)
    reached: dict[str, tuple[tuple[str, ...], ...]] = {}
    for path, copies in stacks.items():
        tensors = [reached_tensors(copy, rules[copy]) if is_reached(copy) else None for copy in copies]
        if all(one is not None and all(name.endswith(WEIGHT) for name in one) for one in tensors):
            reached[path] = tuple(one for one in tensors if one is not None)
    names = {_module(name) for each in reached.values() for tensors in each for name in tensors}
    chosen = _chosen(settings, names, mapping, padded.model_type)
    found = []
    held: dict[tuple[str, ...], str] = {}
    for path, tensors_of in reached.items():
        shapes = {leaf.name: module_shape(leaf) for copy in stacks[path] for leaf in rules[copy].leaves()}
        blocks = _blocks(path, tensors_of, chosen, shapes, held)
        if blocks:
            copies = stacks[path]
            each = tuple(paddings.get(copy) for copy in copies)
            layer_rules = tuple(rules[copy] for copy in copies)
            found.append(Target(path, table[path], copies, layer_rules, tensors_of, each, blocks))
    return tuple(found)


def whole_paths(
    settings: AdapterSettings, targets: Iterable[Target], mapping: FlaxMapping, padded: ArchitectureSpec
) -> frozenset[str]:
    """The stacked paths that are trained beside adapters: those of `modules_to_save`, and biases.

    Raises:
        RequestError: a module that the model does not have.
        UnsupportedError: a part of a fused parameter, a tied embedding or a quantized kernel.
    """
    stacks, table = dict(stacked_paths(padded, padded.parameters)), stacked_parameters(padded)
    adapted = {f"{module}{BIAS}" for target in targets for block in target.blocks for module in block.modules}
    # As in peft, the end of a module's name need not begin at a dot: "norm" chooses input_layernorm too.
    wanted = [re.compile(rf".*{re.escape(module)}\..*") for module in settings.modules_to_save]

    def selected(name: str) -> bool:
        by_bias = settings.bias != "none" and name.endswith(BIAS) and (settings.bias == "all" or name in adapted)
        return by_bias or any(one.fullmatch(name) for one in wanted)

    for module, pattern in zip(settings.modules_to_save, wanted, strict=True):
        if not any(pattern.fullmatch(name) for name in mapping.tensors):
            raise RequestError(
                f"modules_to_save={module!r} was asked for, but this {padded.model_type} model has no such module: use "
                f"the names of modules, such as {', '.join(_tails(map(_module, mapping.tensors)))}."
            )
    found = set()
    for path in table:
        leaves = [leaf.name for copy in stacks.get(path, (path,)) for leaf in mapping[copy].leaves()]
        chosen = [selected(name) for name in leaves]
        if any(chosen) and not all(chosen):
            raise UnsupportedError(
                f"{leaves[chosen.index(True)]} was to be trained beside adapters and {leaves[chosen.index(False)]} was "
                "not, but they are held as one array: choose both in modules_to_save and bias, or neither."
            )
        if all(chosen) and table[path].trained:
            found.add(path)
    if padded.head.tied and "embed.embedding" in found:
        raise UnsupportedError(
            "modules_to_save names the embedding, but this model's head is tied to it, and adapters' files would hold "
            "one of two: leave it out."
        )
    quantized = [path for path in sorted(found) if table[path].format is not None]
    if quantized:
        raise UnsupportedError(
            f"modules_to_save chooses {quantized[0]}, but that is quantized, and updates are smaller than the steps "
            "between its numbers: leave it out, or load the model without quantization."
        )
    return frozenset(found)


def _blocks(
    path: str,
    tensors: tuple[tuple[str, ...], ...],
    chosen: frozenset[str],
    shapes: Mapping[str, tuple[int, ...]],
    held: dict[tuple[str, ...], str],
) -> tuple[Block, ...]:
    """The blocks of a kernel; `held`, modules → the name of their arrays, gets those that no kernel before had."""
    blocks: list[Block] = []
    for role, first in enumerate(tensors[0]):
        layers = tuple(place for place, names in enumerate(tensors) if _module(names[role]) in chosen)
        if layers:
            modules = tuple(_module(tensors[place][role]) for place in layers)
            name = held.setdefault(modules, f"{path.removesuffix('.kernel')}.{_module(first).rsplit('.', 1)[-1]}")
            outputs, inputs = shapes[first]
            blocks.append(Block(name, role, layers, modules, outputs, inputs))
    return tuple(blocks)


def _chosen(settings: AdapterSettings, reached: set[str], mapping: FlaxMapping, model_type: str) -> frozenset[str]:
    targets = settings.target_modules
    others = {_module(name) for name, shape in mapping.tensors.items() if len(shape) > 1} - reached
    if not isinstance(targets, str):
        for target in targets:
            if not any(_ends_with(name, target) for name in reached):
                _refuse_target(target, target, reached, others, model_type)
            beyond = [name for name in others if _ends_with(name, target) and ".experts." not in name]
            if beyond:  # experts are no linear modules in transformers, and peft leaves them alone too
                _refuse_target(target, beyond[0], reached, others, model_type)
    found = frozenset(name for name in reached if _is_target(settings, name))
    if not found and any(_is_target(replace(settings, **_EVERYWHERE), name) for name in reached):
        raise RequestError(
            f"target_modules={targets!r} was asked for, but exclude_modules, modules_to_save and layers_to_transform "
            f"leave none of these modules of this {model_type} model: correct them."
        )
    if not found:
        _refuse_target(str(targets), str(targets), reached, others, model_type)
    return found


def _is_target(settings: AdapterSettings, name: str) -> bool:
    """peft's `check_target_module_exists`."""
    excluded, targets, layers = settings.exclude_modules, settings.target_modules, settings.layers_to_transform
    if re.fullmatch(excluded, name) if isinstance(excluded, str) else any(_ends_with(name, one) for one in excluded):
        return False
    if any(re.match(rf"(^|.*\.){re.escape(one)}($|\..*)", name) for one in settings.modules_to_save):
        return False
    if layers is not None:
        number = re.match(r".*?\.[^.]*\.(\d+)\.", name)
        if number is None or int(number[1]) not in layers:
            return False
    if isinstance(targets, str):
        return targets.lower() == ALL_LINEAR or re.fullmatch(targets, name) is not None
    return any(_ends_with(name, one) for one in targets)


def _refuse_target(target: str, found: str, reached: set[str], others: set[str], model_type: str) -> None:
    if not reached:
        raise UnsupportedError(
            f"target_modules={target!r} was asked for, but adapters reach the projections of softmax attention and "
            f"dense feed-forward layers, and this {model_type} model has none: train its weights, without peft_config."
        )
    names = ", ".join(_tails(reached))
    known = [name for name in others if _ends_with(name, found) or name == found]
    if known:
        raise UnsupportedError(
            f"target_modules={target!r} chooses {sorted(known)[0]}, but adapters reach the projections of attention "
            f"and dense feed-forward layers, and no experts, routers, embeddings or heads: use {names}, or all-linear."
        )
    raise RequestError(
        f"target_modules={target!r} was asked for, but this {model_type} model has no such linear module: use {names}, "
        "or all-linear."
    )


def _tails(modules: Iterable[str]) -> list[str]:
    return sorted({name.rsplit(".", 1)[-1] for name in modules})


def _module(tensor: str) -> str:
    return tensor.removesuffix(WEIGHT).removesuffix(BIAS)


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _made(rule: Expression, read: Any) -> jax.Array:
    """`ttpu_core.mapping.gather` inside jit; `read` returns the array of a leaf."""
    if isinstance(rule, Padded):
        return pad(_made(rule.part, read), rule.padding)
    if isinstance(rule, Concat):
        return jnp.concatenate([_made(part, read) for part in rule.parts], axis=rule.axis)
    if isinstance(rule, Stack):
        return jnp.stack([_made(part, read) for part in rule.parts], axis=rule.axis)
    array: jax.Array = read(rule)
    for operation, argument in rule.views:
        if operation == "reshape":
            array = array.reshape(argument)
        elif operation == "transpose":
            array = array.transpose(argument)
        else:
            array = array[tuple(part if isinstance(part, int) else slice(*part) for part in argument)]
    return array
