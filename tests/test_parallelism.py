"""What users ask for as `parallelism_strategy`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttpu_core.errors import UnsupportedError
from ttpu_core.sharding.hardware import CHIPS
from ttpu_core.sharding.parallelism import (
    NAMED,
    Parallelism,
    parse_mesh,
    parse_rules,
    resolve_parallelism,
    strategy_with,
    written_rules,
)
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY, MESH_AXES
from ttpu_core.sharding.stream import cuts_rows


@pytest.mark.parametrize(
    ("what", "devices", "mesh"),
    [
        ("fsdp", 8, {"fsdp": 8}),
        ("dp", 8, {"data": 8}),
        ("data_parallel", 2, {"data": 2}),
        ("mp", 8, {"tensor": 8}),
        ("model_parallel", 32, {"tensor": 32}),
        ("2d", 4, {"fsdp": 2, "tensor": 2}),
        ("2d", 8, {"fsdp": 2, "tensor": 4}),
        ("2d", 32, {"fsdp": 4, "tensor": 8}),
        ("2d", 6, {"fsdp": 2, "tensor": 3}),
        ("3d", 8, {"data": 2, "fsdp": 2, "tensor": 2}),
        ("3d", 32, {"data": 2, "fsdp": 4, "tensor": 4}),
        ("3D", 64, {"data": 4, "fsdp": 4, "tensor": 4}),
        ("8", 8, {"tensor": 8}),
        ("1x8", 8, {"data": 1, "tensor": 8}),
        ("2x4", 8, {"data": 2, "tensor": 4}),
        ("8x4", 32, {"data": 8, "tensor": 4}),
        ("2x2x2", 8, {"data": 2, "fsdp": 2, "tensor": 2}),
        ("data=2,fsdp=2,tensor=2", 8, {"data": 2, "fsdp": 2, "tensor": 2}),
        ("tensor=2 , data=3", 8, {"data": 3, "tensor": 2}),
        ("sequence=4,expert=2", 8, {"expert": 2, "sequence": 4}),
        *((name, 1, {}) for name in NAMED),
    ],
)
def test_what_is_asked_for_becomes_a_mesh(what: str, devices: int, mesh: dict[str, int]) -> None:
    found = resolve_parallelism(what, devices)
    assert dict(found.mesh) == mesh
    assert list(dict(found.mesh)) == [axis for axis in MESH_AXES if axis in mesh]
    assert found.strategy == DEFAULT_STRATEGY and found.num_slices == 1


def test_slices_lie_along_the_axes_that_say_dcn() -> None:
    found = resolve_parallelism("dcn.data=2,fsdp=4,tensor=2", 16)
    assert (dict(found.mesh), dict(found.dcn)) == ({"data": 2, "fsdp": 4, "tensor": 2}, {"data": 2})
    assert (found.num_devices, found.num_slices) == (16, 2)
    both = resolve_parallelism("dcn.data=2,data=4", 8)
    assert (dict(both.mesh), dict(both.dcn)) == ({"data": 8}, {"data": 2})


@pytest.mark.parametrize("text", ["data=2,tensor=4", "dcn.data=2,data=4", "dcn.data=2,fsdp=4,tensor=2", "sequence=8"])
def test_a_mesh_is_written_as_it_is_read(text: str) -> None:
    found = resolve_parallelism(text, 64)
    assert resolve_parallelism(str(found), 64) == found


@given(st.sampled_from(sorted(NAMED)), st.integers(1, 512))
def test_a_named_strategy_takes_all_devices_or_says_how_many_it_could(name: str, devices: int) -> None:
    try:
        found = resolve_parallelism(name, devices)
    except UnsupportedError as error:
        assert f"{devices} devices cannot be shared by {len(NAMED[name])} axes" in str(error)
    else:
        assert found.num_devices == devices
        assert devices == 1 or (tuple(dict(found.mesh)) == NAMED[name] and min(dict(found.mesh).values()) > 1)


@pytest.mark.parametrize(
    ("what", "devices", "sentence"),
    [
        ("3d", 4, "shards along data and fsdp and tensor, but 4 devices cannot be shared by 3 axes.*take 8, 12, 16"),
        ("2d", 2, "2 devices cannot be shared by 2 axes of two or more: take 4, 6, 8"),
        ("2d", 7, "7 devices cannot be shared"),
        ("2x8", 8, "'2x8' was asked for, which is 16 devices, but there are 8: make it smaller"),
        ("tensor=2", 1, "which is 2 devices, but there is 1"),
        ("1x1x1x8", 8, "a shape has one to three sizes"),
        ("0x8", 8, "a shape has one to three sizes of 1 or more"),
        ("tensr=2", 8, "'tensr=2' in it is not an axis and its size"),
        ("tensor=2,tensor=4", 8, "each of stage, data, fsdp, expert, sequence, tensor at most once"),
        ("tensor=0", 8, "not an axis and its size"),
        ("tensor=", 8, "not an axis and its size"),
        ("fdsp", 8, "it is no strategy: there are fsdp, .*, auto, shapes .*; write 'fsdp'"),
        ("pipeline", 8, "write one of them"),
    ],
)
def test_what_these_devices_cannot_form_is_refused_in_one_sentence(what: str, devices: int, sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence) as caught:
        resolve_parallelism(what, devices)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_refusal_names_the_argument_that_was_given() -> None:
    for what, devices in (("fdsp", 8), ("3d", 4)):
        with pytest.raises(UnsupportedError, match=f"^mesh '{what}' was asked for"):
            resolve_parallelism(what, devices, argument="mesh")


def test_rules_of_the_user_s_own_replace_the_usual_ones() -> None:
    table = dict(strategy_with({"mlp": ["fsdp", "tensor"], "embed": None, "q_per_kv": "tensor"}).rules)
    assert (table["mlp"], table["embed"], table["q_per_kv"]) == (("fsdp", "tensor"), (), ("tensor",))
    assert table["vocab"] == ("tensor",)
    assert resolve_parallelism("mp", 2, {"mlp": None}).strategy == strategy_with({"mlp": None})
    assert strategy_with(None) is strategy_with({}) is DEFAULT_STRATEGY


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        (
            {"heads": "tensor"},
            "the logical axis 'heads', but there is none of that name: the logical axes are .*kv_heads",
        ),
        (
            {"mlp": "model"},
            "the mesh axis 'model', but there is none of that name: the mesh axes are data, expert, fsdp",
        ),
    ],
)
def test_rules_with_unknown_axes_are_refused(rules: dict[str, str], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        strategy_with(rules)


def test_rules_are_written_as_text() -> None:
    assert parse_rules(" expert = data+tensor ,embed=none,mlp=tensor") == {
        "expert": ("data", "tensor"),
        "embed": None,
        "mlp": ("tensor",),
    }
    assert written_rules({"expert": ("data", "tensor"), "embed": None, "mlp": "tensor"}) == (
        "expert=data+tensor,embed=none,mlp=tensor"
    )


@pytest.mark.parametrize("text", ["expert", "expert=", "expert=data+", "mlp=data,mlp=tensor", "", "mlp=a b"])
def test_text_that_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match=r"sharding rules .* write for example 'expert=data\+tensor,embed=none'"):
        parse_rules(text)


def test_one_device_is_said_in_words() -> None:
    assert str(Parallelism()) == "one device"
    assert parse_mesh("tensor=4,data=2") == {"data": 2, "tensor": 4}


def test_rows_are_cut_where_links_have_two_dimensions_and_tokens_are_enough() -> None:
    assert {name for name, chip in CHIPS.items() if cuts_rows(1, 2048, 8, chip)} == {"v5e", "v6e"}
    v5e = CHIPS["v5e"]
    assert not cuts_rows(1, 512, 8, v5e) and not cuts_rows(1, 2050, 8, v5e) and not cuts_rows(1, 2048, 1, v5e)
    assert cuts_rows(2, 512, 8, v5e), "of several rows"
    assert not cuts_rows(1, 2048, 8, None)
