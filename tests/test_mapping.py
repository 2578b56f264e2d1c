"""Whatever a mapping can say, it says in both directions: checkpoint → parameters → checkpoint gives the same bits, and
a mapping that would lose, repeat or misplace one element is refused before anything is read."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import mul
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttpu_core.checkpoint.unread import unread_sentences, unread_tensors
from ttpu_core.errors import MappingError
from ttpu_core.mapping import Concat, Expression, FlaxMapping, Shape, Stack, Tensor, gather, scatter, stack_layers
from ttpu_core.mapping.layout import standard_mapping
from ttpu_core.mapping.strides import Layout, covers_once
from ttpu_core.spec import (
    ArchitectureSpec,
    AttentionSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    Parameter,
)
from ttpu_core.spec.rope import RopeSpec

Arrays = dict[str, np.ndarray]


def checkpoint(tensors: Mapping[str, Shape]) -> Arrays:
    """Random bit patterns, NaNs and negative zeros among them: only a copy of the bits gives them back."""
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 2**16, shape, np.uint16).view(np.float16) for name, shape in tensors.items()}


def to_flax(mapping: FlaxMapping, tensors: Mapping[str, np.ndarray]) -> Arrays:
    parameters = {path: np.full(rule.result_shape, 7, np.float16) for path, rule in mapping.rules}
    for path, rule in mapping.rules:
        gather(rule, tensors.__getitem__, parameters[path])
    return parameters


def to_checkpoint(mapping: FlaxMapping, parameters: Mapping[str, np.ndarray]) -> Arrays:
    tensors: Arrays = {}
    for path, rule in mapping.rules:
        scatter(rule, parameters[path], lambda leaf: tensors.setdefault(leaf.name, np.full(leaf.shape, 9, np.float16)))
    return tensors


def mapping_of(**rules: Expression) -> FlaxMapping:
    return FlaxMapping(tuple(rules.items()))


def table_of(mapping: FlaxMapping) -> dict[str, Parameter]:
    return {path: Parameter(rule.result_shape, (None,) * len(rule.result_shape)) for path, rule in mapping.rules}


def round_trip(mapping: FlaxMapping) -> tuple[Arrays, Arrays]:
    """(checkpoint, parameters), once the mapping was found complete and its way back gave the checkpoint's bits."""
    mapping.check_parameters(table_of(mapping))
    tensors = checkpoint(mapping.tensors)
    mapping.resolve({name: array.shape for name, array in tensors.items()})
    parameters = to_flax(mapping, tensors)
    assert_same_bits(to_checkpoint(mapping, parameters), tensors)
    return tensors, parameters


def assert_same_bits(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].shape == right[name].shape
        assert left[name].tobytes() == right[name].tobytes(), name


def refusal(read: Callable[[], Any]) -> str:
    """The message of the MappingError that `read` raises: one sentence."""
    with pytest.raises(MappingError) as caught:
        read()
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message and ": " in message
    return message


# -- every operation, there and back ---------------------------------------------------------------------------------


def test_a_rename_copies() -> None:
    tensors, parameters = round_trip(mapping_of(p=Tensor("t", (2, 3))))
    assert_same_bits({"p": parameters["p"]}, {"p": tensors["t"]})


def test_a_transpose_and_a_reshape_do_what_numpys_do() -> None:
    mapping = mapping_of(
        a=Tensor("a", (2, 3, 4)).transpose(2, 0, 1),
        b=Tensor("b", (6, 4)).reshape(2, 3, 4),
        c=Tensor("c", (6, 4)).reshape(2, 3, 4).transpose(1, 0, 2),
        scalar=Tensor("scalar", ()).reshape(1),
    )
    tensors, parameters = round_trip(mapping)
    expected = {
        "a": tensors["a"].transpose(2, 0, 1),
        "b": tensors["b"].reshape(2, 3, 4),
        "c": tensors["c"].reshape(2, 3, 4).transpose(1, 0, 2),
        "scalar": tensors["scalar"].reshape(1),
    }
    assert_same_bits(parameters, expected)


def test_one_tensor_is_split_by_slices_into_several_parameters() -> None:
    fused = Tensor("c_attn.weight", (4, 12)).transpose(1, 0)  # gpt2's Conv1D stores [in, out]
    tensors, parameters = round_trip(mapping_of(q=fused[:4], k=fused[4:8], v=fused[8:]))
    assert_same_bits({"k": parameters["k"]}, {"k": tensors["c_attn.weight"][:, 4:8].T})


def test_an_index_drops_the_dimension_and_a_slice_keeps_it() -> None:
    fused = Tensor("qkv", (3, 2, 5))
    tensors, parameters = round_trip(mapping_of(q=fused[0], k=fused[-2], v=fused[2:, :1], rest=fused[2:, 1:]))
    assert_same_bits({"q": parameters["q"], "k": parameters["k"]}, {"q": tensors["qkv"][0], "k": tensors["qkv"][1]})
    assert parameters["v"].shape == (1, 1, 5)


def test_single_elements_are_taken_and_stacked() -> None:
    round_trip(mapping_of(p=Stack((Tensor("a", ()), Tensor("b", (2,))[0])), q=Tensor("b", (2,))[1]))


def test_several_parts_of_several_tensors_make_one_parameter() -> None:
    a, b = Tensor("a", (4, 3)), Tensor("b", (2, 3))
    tensors, parameters = round_trip(mapping_of(p=Concat((a[2:], b, a[:2]))))
    assert_same_bits(parameters, {"p": np.concatenate([tensors["a"][2:], tensors["b"], tensors["a"][:2]])})


def test_queries_keys_and_values_are_fused_by_kv_head() -> None:
    kv, group, dim, hidden = 2, 3, 4, 5
    q = Tensor("q", (kv * group * dim, hidden)).reshape(kv, group, dim, hidden)
    k, v = (Tensor(name, (kv * dim, hidden)).reshape(kv, 1, dim, hidden) for name in "kv")
    tensors, parameters = round_trip(mapping_of(qkv=Concat((q, k, v), axis=1)))
    for head in range(kv):
        fused = parameters["qkv"][head].reshape(-1, hidden)
        own = [np.split(tensors[name], kv)[head] for name in "qkv"]
        assert fused.tobytes() == np.concatenate(own).tobytes()


def test_experts_in_tensors_of_their_own_are_stacked() -> None:
    experts = [Stack((Tensor(f"experts.{i}.w1", (3, 2)), Tensor(f"experts.{i}.w3", (3, 2)))) for i in range(4)]
    tensors, parameters = round_trip(mapping_of(gate_up=Stack(tuple(experts))))
    assert parameters["gate_up"].shape == (4, 2, 3, 2)
    assert parameters["gate_up"][2, 1].tobytes() == tensors["experts.2.w3"].tobytes()


def test_experts_in_one_transposed_tensor_with_gate_before_up() -> None:  # llama4: [expert, hidden, 2 * inner]
    experts, hidden, inner = 4, 2, 3
    rule = Tensor("gate_up", (experts, hidden, 2 * inner)).reshape(experts, hidden, 2, inner).transpose(0, 2, 3, 1)
    tensors, parameters = round_trip(mapping_of(gate_up=rule))
    up = tensors["gate_up"][:, :, inner:].swapaxes(1, 2)
    assert parameters["gate_up"][:, 1].tobytes() == up.tobytes()
    fused = Tensor("gate_up", (experts, hidden, 2 * inner))
    halves = Stack((fused[:, :, :inner].transpose(0, 2, 1), fused[:, :, inner:].transpose(0, 2, 1)), axis=1)
    sliced = mapping_of(gate_up=halves)
    sliced.check_parameters(table_of(sliced))
    assert_same_bits(to_flax(sliced, tensors), parameters)  # said by slices, it is the same


def test_experts_whose_gate_and_up_rows_alternate() -> None:  # gpt_oss: [expert, hidden, (gate, up) * inner]
    fused = Tensor("gate_up", (4, 2, 6))
    pair = (fused[:, :, ::2].transpose(0, 2, 1), fused[:, :, 1::2].transpose(0, 2, 1))
    tensors, parameters = round_trip(mapping_of(gate_up=Stack(pair, axis=1)))
    assert parameters["gate_up"].shape == (4, 2, 3, 2)
    assert parameters["gate_up"][:, 1].tobytes() == tensors["gate_up"][:, :, 1::2].swapaxes(1, 2).tobytes()


def test_axes_count_from_the_end_too() -> None:
    parts = (Tensor("a", (2, 3)), Tensor("b", (2, 3)))
    assert Concat(parts, axis=-1) == Concat(parts, axis=1) and Concat(parts, axis=-1).result_shape == (2, 6)
    assert Stack(parts, axis=-1) == Stack(parts, axis=2) and Stack(parts, axis=-1).result_shape == (2, 3, 2)
    round_trip(mapping_of(p=Concat(parts, axis=-1)))
    round_trip(mapping_of(p=Stack(parts, axis=-1)))


# -- a whole model ---------------------------------------------------------------------------------------------------


def decoder(windows: tuple[int | None, ...] = (None, None), **head: Any) -> ArchitectureSpec:
    """A small llama, with a window where one is given."""
    layers = tuple(
        LayerSpec(
            AttentionSpec(4, 2, head_dim=2, rope=RopeSpec(rotary_dim=2), window=window, qkv_bias=True),
            MLPSpec(5),
            NormSpec(),
        )
        for window in windows
    )
    return ArchitectureSpec("llama", EmbeddingSpec(7, 4), layers, NormSpec(), HeadSpec(**head), 16)


def test_the_standard_mapping_holds_for_every_parameter_and_returns_every_tensor() -> None:
    spec = decoder()
    mapping = standard_mapping(spec)
    mapping.check_parameters(spec.parameters)
    tensors, _ = round_trip(mapping)
    assert "model.layers.1.self_attn.k_proj.bias" in tensors and "lm_head.weight" in tensors


def test_stacked_layers_hold_each_layers_parameters_in_order() -> None:
    spec = decoder((3, 3, None, 3, 3, None, 3))
    mapping = standard_mapping(spec)
    stacked = stack_layers(mapping, spec)
    tensors = checkpoint(mapping.tensors)
    by_layer, by_group = to_flax(mapping, tensors), to_flax(stacked, tensors)
    assert_same_bits(to_checkpoint(stacked, by_group), tensors)
    assert [(g.start, len(g.unit), g.repeats) for g in spec.groups()] == [(0, 3, 2), (6, 1, 1)]
    name = "attention.qkv.kernel"
    for group, position, layers in ((0, 0, (0, 3)), (0, 1, (1, 4)), (0, 2, (2, 5)), (1, 0, (6,))):
        expected = np.stack([by_layer[f"layers.{layer}.{name}"] for layer in layers])
        assert by_group[f"groups.{group}.{position}.{name}"].tobytes() == expected.tobytes()
    assert by_group["embed.embedding"].tobytes() == by_layer["embed.embedding"].tobytes()


def test_a_tied_head_may_be_in_the_checkpoint_or_not() -> None:
    mapping = standard_mapping(decoder(tied=True))
    names = dict(mapping.tensors)
    assert "lm_head.weight" not in mapping.resolve(names)
    assert "lm_head.weight" not in mapping.resolve(names | {"lm_head.weight": (7, 4)})


def test_a_tied_head_stands_for_an_embedding_that_is_not_there() -> None:
    mapping = replace(standard_mapping(decoder(tied=True)), prefixes=(("language_model.", ""),))
    shapes = {name.replace("model.embed_tokens", "lm_head"): shape for name, shape in mapping.tensors.items()}
    assert mapping.resolve(shapes)["model.embed_tokens.weight"] == "lm_head.weight"
    assert mapping.canonical(shapes)["model.embed_tokens.weight"] == "lm_head.weight"
    below = {f"language_model.{name}": shape for name, shape in shapes.items()}
    assert mapping.resolve(below)["model.embed_tokens.weight"] == "language_model.lm_head.weight"
    message = refusal(lambda: mapping.resolve(shapes | {"lm_head.weight": (8, 4)}))
    assert "'lm_head.weight' in the checkpoint has shape (8, 4), but the config asks for (7, 4)" in message
    del shapes["lm_head.weight"]  # and no tied tensor of a layer does, which repeats another layer's
    name = "model.layers.9.mlp.down_proj.weight"
    message = refusal(lambda: replace(mapping, tied=(*mapping.tied, name)).resolve(shapes | {name: (7, 4)}))
    assert "no tensor 'model.embed_tokens.weight'" in message


def test_an_untied_head_must_be_in_the_checkpoint() -> None:
    mapping = standard_mapping(decoder())
    names = dict(mapping.tensors)
    del names["lm_head.weight"]
    assert "no tensor 'lm_head.weight'" in refusal(lambda: mapping.resolve(names, "model.safetensors"))


def test_buffers_that_follow_from_the_config_are_ignored() -> None:
    mapping = standard_mapping(decoder())
    extras: dict[str, Shape] = {"model.layers.0.self_attn.rotary_emb.inv_freq": (1,), "rotary_emb.inv_freq": (1,)}
    assert set(mapping.resolve(mapping.tensors | extras)) == set(mapping.tensors)


def test_an_ignored_pattern_must_match_the_whole_name() -> None:
    mapping = replace(mapping_of(p=Tensor("t", (2,))), ignored=(r"mtp\..*",))
    assert mapping.resolve({"t": (2,), "mtp.weight": (9,)}) == {"t": "t"}
    assert "'old_mtp.weight'" in refusal(lambda: mapping.resolve({"t": (2,), "old_mtp.weight": (9,)}))


def test_a_base_models_checkpoint_has_no_prefix() -> None:
    mapping = standard_mapping(decoder(tied=True))
    bare = {name.removeprefix("model."): shape for name, shape in mapping.tensors.items()}
    assert mapping.resolve(bare) == {name: name.removeprefix("model.") for name in mapping.tensors}


def test_a_multimodal_checkpoint_keeps_the_text_model_under_a_prefix_of_its_own() -> None:
    mapping = replace(
        standard_mapping(decoder()),
        prefixes=(("model.language_model.", "model."), ("language_model.", "")),
        ignored=(r"model\.vision_tower\..*",),
    )
    nested = {name.replace("model.", "model.language_model.", 1): shape for name, shape in mapping.tensors.items()}
    found = mapping.resolve(nested | {"model.vision_tower.patch.weight": (9, 9)})
    assert found["model.norm.weight"] == "model.language_model.norm.weight"
    assert found["lm_head.weight"] == "lm_head.weight"
    older = {f"language_model.{name}": shape for name, shape in mapping.tensors.items()}
    assert mapping.resolve(older)["model.norm.weight"] == "language_model.model.norm.weight"


def test_a_tied_head_under_another_prefix_is_known_too() -> None:
    mapping = replace(standard_mapping(decoder(tied=True)), prefixes=(("language_model.", ""),))
    names = {f"language_model.{name}": shape for name, shape in (mapping.tensors | {"lm_head.weight": (7, 4)}).items()}
    assert set(mapping.resolve(names)) == set(mapping.tensors)


# -- what a checkpoint is refused for --------------------------------------------------------------------------------


def test_a_missing_tensor_is_refused() -> None:
    mapping = mapping_of(p=Tensor("a", (2,)), q=Tensor("b", (2,)))
    message = refusal(lambda: mapping.resolve({"a": (2,)}, "weights"))
    assert message.startswith("weights has no tensor 'b'")


def test_a_tensor_that_no_rule_accounts_for_is_refused() -> None:
    message = refusal(lambda: mapping_of(p=Tensor("a", (2,))).resolve({"a": (2,), "b": (3,)}, "weights"))
    assert message.startswith("weights holds 'b', which no rule accounts for")


def test_a_tensor_of_another_shape_is_refused() -> None:
    message = refusal(lambda: mapping_of(p=Tensor("a", (2, 3))).resolve({"a": (3, 2)}, "weights"))
    assert "'a' in weights has shape (3, 2), but the config asks for (2, 3)" in message


def test_two_tensors_for_one_place_are_refused() -> None:
    mapping = replace(mapping_of(p=Tensor("model.a", (2,))), prefixes=(("", "model."),))
    message = refusal(lambda: mapping.resolve({"model.a": (2,), "a": (2,)}, "weights"))
    assert "both 'model.a' and 'a'" in message


def test_a_long_list_is_cut() -> None:
    mapping = mapping_of(**{f"p{i}": Tensor(f"t{i}", (1,)) for i in range(9)})
    assert "'t0', 't1', 't2', 't3' and 5 more" in refusal(lambda: mapping.resolve({}))


# -- what a mapping is refused for -----------------------------------------------------------------------------------


def refused_mapping(mapping: FlaxMapping, **changes: Parameter | None) -> str:
    """Why the mapping does not serve the parameters that its rules make, `changes` made to them."""
    table = table_of(mapping) | {path: parameter for path, parameter in changes.items() if parameter is not None}
    for path, parameter in changes.items():
        if parameter is None:
            del table[path]
    return refusal(lambda: mapping.check_parameters(table))


def test_a_parameter_without_a_rule_is_refused() -> None:
    extra = Parameter((3,), (None,))
    assert "no rule for the parameter 'q'" in refused_mapping(mapping_of(p=Tensor("a", (2,))), q=extra)


def test_a_rule_without_a_parameter_is_refused() -> None:
    message = refused_mapping(mapping_of(p=Tensor("a", (2,)), q=Tensor("b", (2,))), q=None)
    assert "a rule for 'q'" in message and "no such parameter" in message


def test_a_rule_of_another_shape_than_the_parameter_is_refused() -> None:
    message = refused_mapping(mapping_of(p=Tensor("a", (2, 3))), p=Parameter((3, 2), (None, None)))
    assert "makes p of shape (2, 3), but the architecture needs (3, 2)" in message


def test_two_rules_for_one_parameter_are_refused() -> None:
    rules = (("p", Tensor("a", (2,))), ("p", Tensor("b", (2,))))
    assert "more than one rule for 'p'" in refusal(lambda: FlaxMapping(rules))


def test_a_tensor_that_is_used_in_part_is_refused() -> None:
    assert "uses 4 of the 6 elements of 'a'" in refused_mapping(mapping_of(p=Tensor("a", (3, 2))[:2]))


def test_a_tensor_that_is_used_twice_is_refused() -> None:
    mapping = mapping_of(p=Tensor("a", (3, 2)), q=Tensor("a", (3, 2)))
    assert "uses 12 of the 6 elements of 'a'" in refused_mapping(mapping)


@pytest.mark.parametrize(
    "slices",
    [
        lambda t: (t[:2], t[1:3]),  # row 1 twice, row 3 never
        lambda t: (t[:, ::2], t[:, 0::2]),  # the even columns twice
        lambda t: (t[:2], t[:2].transpose(1, 0)),
        lambda t: (t.reshape(2, 2, 6)[:, 0], t.reshape(2, 2, 6)[0]),
        lambda t: (t[::-1][:2], t[2:]),
    ],
)
def test_slices_that_use_one_element_twice_and_leave_another_out_are_refused(
    slices: Callable[[Tensor], tuple[Tensor, ...]],
) -> None:
    parts = dict(zip("pq", slices(Tensor("a", (4, 6))), strict=True))
    message = refused_mapping(mapping_of(**parts))
    assert "uses some elements of 'a' more than once and leaves as many out" in message


def test_a_tensor_with_two_shapes_is_refused() -> None:
    mapping = mapping_of(p=Tensor("a", (4, 2))[:2], q=Tensor("a", (2, 4))[:1])
    assert "'a' the shape (4, 2) in one rule and (2, 4) in another" in refused_mapping(mapping)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda t: t.reshape(5, 5), "different numbers of elements"),
        (lambda t: t.reshape(-4, -6), "different numbers of elements"),
        (lambda t: t.transpose(1, 0).reshape(24), "could not be written back"),
        (lambda t: t[:, :2].reshape(8), "could not be written back"),
        (lambda t: t.transpose(0, 0), "each of the dimensions 0, 1 is needed once"),
        (lambda t: t.transpose(), "each of the dimensions 0, 1 is needed once"),
        (lambda t: t[0, 0, 0], "whose shape there is (4, 6)"),
        (lambda t: t[4], "whose shape there is (4, 6)"),
        (lambda t: Concat((t, Tensor("b", (4, 5)))).result_shape, "which differ elsewhere"),
        (lambda t: Concat((t, Tensor("b", (4,)))).result_shape, "which differ elsewhere"),
        (lambda t: Stack((t, Tensor("b", (4, 5)))).result_shape, "stacked parts must be equal"),
        (lambda t: Concat((t,), axis=2), "along axis 2, but the result has 2 dimensions"),
        (lambda t: Stack((t,), axis=-4), "along axis -4, but the result has 3 dimensions"),
        (lambda t: Stack(()), "an empty list"),
    ],
)
def test_an_operation_that_no_array_allows_is_refused_where_it_is_written(
    write: Callable[[Tensor], Any], words: str
) -> None:
    assert words in refusal(lambda: write(Tensor("a", (4, 6))))


# -- properties ------------------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)


@st.composite
def mappings(draw: st.DrawFn) -> FlaxMapping:
    """Complete mappings of random expression trees; what a slice leaves over goes to a parameter of its own."""
    rules: dict[str, Expression] = {}
    count = iter(range(10_000))

    def leaf(shape: Shape) -> Tensor:
        order = draw(st.permutations(range(len(shape))))
        stored = tuple(shape[order.index(axis)] for axis in range(len(shape)))
        cut = draw(st.integers(0, len(stored)))
        merged = (*stored[:cut], int(np.prod(stored[cut:])))
        return Tensor(f"t{next(count)}", merged).reshape(*stored).transpose(*order)

    def sliced(shape: Shape) -> Expression:
        axis = draw(st.integers(0, len(shape) - 1))
        step, head = draw(st.integers(2, 3)), (slice(None),) * axis
        whole = leaf((*shape[:axis], shape[axis] * step, *shape[axis + 1 :]))
        first = draw(st.integers(0, step - 1))
        for other in range(step):
            if other != first:
                rules[f"rest{next(count)}"] = whole[(*head, slice(other, None, step))]
        return whole[(*head, slice(first, None, step))]

    def tree(shape: Shape, depth: int) -> Expression:
        kinds = ["leaf"]
        if depth and shape:
            kinds += ["slice", "stack"]
            if max(shape) > 1:
                kinds.append("concat")
        kind = draw(st.sampled_from(kinds))
        if kind == "slice":
            return sliced(shape)
        if kind == "stack":
            axis = draw(st.integers(0, len(shape) - 1))
            rest = shape[:axis] + shape[axis + 1 :]
            return Stack(tuple(tree(rest, depth - 1) for _ in range(shape[axis])), axis)
        if kind == "concat":
            axis = draw(st.sampled_from([axis for axis, dim in enumerate(shape) if dim > 1]))
            cut = draw(st.integers(1, shape[axis] - 1))
            sizes = (cut, shape[axis] - cut)
            parts = tuple(tree((*shape[:axis], size, *shape[axis + 1 :]), depth - 1) for size in sizes)
            return Concat(parts, axis)
        return leaf(shape)

    for number in range(draw(st.integers(1, 2))):
        shape = draw(shapes)
        rules[f"p{number}"] = tree(shape, 3)
        assert rules[f"p{number}"].result_shape == shape
    return FlaxMapping(tuple(rules.items()))


@settings(max_examples=200, deadline=None)
@given(mappings())
def test_any_tree_of_operations_gives_the_checkpoints_bits_back(mapping: FlaxMapping) -> None:
    round_trip(mapping)


@st.composite
def views(draw: st.DrawFn, shape: Shape) -> Tensor:
    """A random chain of views of one tensor; reshapes that would need a copy are left out."""
    view = Tensor("t", shape)
    for _ in range(draw(st.integers(0, 3))):
        rank = len(view.result_shape)
        kind = draw(st.sampled_from(["transpose", "take", "split"]))
        if kind == "transpose":
            view = view.transpose(*draw(st.permutations(range(rank))))
        elif kind == "take" and rank and 0 not in view.result_shape:
            axis = draw(st.integers(0, rank - 1))
            taken: int | slice = draw(st.slices(view.result_shape[axis]))
            if draw(st.booleans()):
                taken = draw(st.integers(-view.result_shape[axis], view.result_shape[axis] - 1))
            view = view[(*(slice(None),) * axis, taken)]
        elif kind == "split" and rank:
            merge = draw(st.integers(0, rank - 1))
            dims = view.result_shape
            target = (*dims[:merge], int(np.prod(dims[merge:])))
            if view.layout.reshape(target) is not None:
                view = view.reshape(*target)
    return view


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_layout_says_where_numpys_view_lies_and_when_numpy_would_copy(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    view = data.draw(views(shape))
    elements = np.arange(int(np.prod(shape))).reshape(shape)
    seen = view.view(elements)
    assert view.layout.shape == view.result_shape == seen.shape
    offset, strides = view.layout.offset, view.layout.strides
    places = [offset + sum(map(mul, index, strides)) for index in np.ndindex(*seen.shape)]
    assert places == seen.reshape(-1).tolist()
    target = data.draw(st.permutations(seen.shape)) if data.draw(st.booleans()) else [seen.size]
    try:
        seen.reshape(target, copy=False)
        copied = False
    except ValueError:
        copied = True
    assert (view.layout.reshape(tuple(target)) is None) == copied


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_covers_once_agrees_with_counting(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    size = int(np.prod(shape))
    parts = [Tensor("t", shape)]
    for _ in range(data.draw(st.integers(0, 4))):  # cut one part in two, or in a comb and the rest
        victim = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        axis = data.draw(st.integers(0, len(shape) - 1))
        head, dim = (slice(None),) * axis, victim.result_shape[axis]
        cut, step = data.draw(st.integers(0, dim)), data.draw(st.integers(1, 3))
        comb = step > 1
        parts += [victim[(*head, slice(start, None, step))] for start in range(step)] if comb else []
        parts += [] if comb else [victim[(*head, slice(0, cut))], victim[(*head, slice(cut, None))]]
    if data.draw(st.booleans()):  # and spoil it
        parts[data.draw(st.integers(0, len(parts) - 1))] = data.draw(views(shape))
    elements = np.arange(size).reshape(shape)
    counts = np.zeros(size, int)
    for part in parts:
        np.add.at(counts, part.view(elements).reshape(-1), 1)
    assert covers_once(size, [part.layout for part in parts]) == bool((counts == 1).all())


def test_covering_is_exact_at_the_size_of_real_checkpoints() -> None:
    """A check that marked elements one by one would take gigabytes here."""
    experts, hidden, inner = 128, 2880, 2880
    fused = Tensor("t", (experts, hidden, 2 * inner))
    pairs = [fused[e, :, p::2] for e in range(experts) for p in (0, 1)]
    size = experts * hidden * 2 * inner
    assert covers_once(size, [part.layout for part in pairs])
    assert not covers_once(size, [part.layout for part in [*pairs[:-1], pairs[0]]])
    columns = Tensor("t", (12288, 3 * 12288)).transpose(1, 0)
    thirds = [columns[i * 12288 : (i + 1) * 12288].layout for i in range(3)]
    assert covers_once(3 * 12288**2, thirds) and not covers_once(3 * 12288**2, [thirds[0], thirds[0], thirds[2]])


def test_an_empty_layout_covers_nothing() -> None:
    assert covers_once(0, []) and covers_once(0, [Layout.contiguous((0, 3))]) and not covers_once(1, [])


def test_tensors_that_a_mapping_ignores_are_told_in_one_sentence() -> None:
    mapping = FlaxMapping((("head.kernel", Tensor("head", (2, 2))),), tied=("tied",), ignored=(r"mtp\..*", "head"))
    held = ("head", "tied", "mtp.a", "mtp.b", "unknown")
    assert unread_tensors(mapping, held) == ("mtp.a", "mtp.b")
    assert unread_sentences(mapping, held, "here") == (
        "nothing reads 'mtp.a' and 1 more in here, which the plugin ignores, so they have no effect",
    )
    assert unread_sentences(mapping, ("head", "tied"), "here") == ()
