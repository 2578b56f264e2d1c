"""Attention by name: which implementation a layer gets, and what it is told. The kernels' numbers are in
test_attention_kernels.py."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from tiny import llama_checkpoint

from ttpu import AutoModelForTPU
from ttpu_core.checkpoint import open_checkpoint
from ttpu_core.config import ModelConfig
from ttpu_core.errors import PluginError, RequestError, TTPUError, UnsupportedError
from ttpu_core.registry import default_registry
from ttpu_core.spec import AlibiSpec, AttentionSpec, KernelChoice, LayerSpec, NormSpec
from ttpu_jax.aot.topology import tpu_topology
from ttpu_jax.backend import JaxBackend
from ttpu_jax.ops.attention import IMPLEMENTATIONS, AttentionContext, attend, choose, eager, reference
from ttpu_jax.ops.attention.blocks import BLOCKS, COMPUTE_OF, QUERY_BLOCKS, fit, splash_blocks
from ttpu_jax.ops.attention.reference import FEW_QUERIES

FULL = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8)
SLIDING, CHUNKED = replace(FULL, window=5), replace(FULL, chunk=5)
ALIBI = replace(FULL, alibi=AlibiSpec())
PACK = KernelChoice("attention", "a_pack:attend", backend="jax", source="a-pack")


def layers(*mixers: AttentionSpec) -> list[LayerSpec]:
    return [LayerSpec(mixer=mixer, mlp=None, norm=NormSpec()) for mixer in mixers]


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module `a_pack` whose `attend` is somebody else's attention."""
    module = ModuleType("a_pack")

    def attend(query: jax.Array, *arrays: jax.Array, **options: Any) -> jax.Array:
        return jnp.full_like(query, 7)

    monkeypatch.setattr(module, "attend", attend, raising=False)
    monkeypatch.setitem(sys.modules, "a_pack", module)
    return module


# Which implementation


def test_auto_is_splash_on_a_tpu_for_prefill_and_a_kernel_for_decode() -> None:
    wide = [replace(one, head_dim=128) for one in (FULL, SLIDING, FULL, CHUNKED)]
    choice = choose("auto", layers(*wide), "tpu")
    assert choice.name == "splash_attention"
    found = [(kind.kind, kind.prefill, kind.decode) for kind in choice.kinds]
    assert found == [(kind, "splash_attention", "decode_attention") for kind in ("full", "sliding", "chunked")]
    assert all("default on a TPU" in kind.reason and "not to a cache" in kind.reason for kind in choice.kinds)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_auto_is_the_reference_elsewhere(platform: str) -> None:
    choice = choose("auto", layers(FULL), platform, config={"sa_block_q": 128})
    assert (choice.name, choice.kinds[0].decode, choice.options) == ("eager", "eager", ())


def test_layers_that_a_kernel_does_not_serve_take_the_reference_and_the_plan_says_why() -> None:
    choice = choose("auto", layers(FULL, ALIBI), "tpu")
    assert [kind.prefill for kind in choice.kinds] == ["splash_attention", "eager"]
    assert "ALiBi" in choice.kinds[1].reason and choice.kinds[1].decode == "eager"
    assert choose("auto", layers(ALIBI), "tpu").name == "eager"
    flash = choose("xla_flash_attention", layers(FULL, SLIDING, CHUNKED), "tpu")
    assert [kind.prefill for kind in flash.kinds] == ["xla_flash_attention", "eager", "xla_flash_attention"]
    assert "no windows" in flash.kinds[1].reason


def test_a_packs_choice_comes_before_the_platforms_and_after_the_callers(pack: ModuleType) -> None:
    choice = choose("auto", layers(FULL), "tpu", PACK)
    assert choice.name == choice.kinds[0].prefill == choice.kinds[0].decode == "a_pack:attend"
    assert choice.reason == "chosen by a-pack"
    plain = choose("eager", layers(FULL), "tpu", PACK)
    assert plain.name == plain.kinds[0].prefill == plain.kinds[0].decode == "eager"


def test_a_function_may_say_what_it_does_not_serve(pack: ModuleType) -> None:
    pack.attend.serves = lambda spec, context, queries, keys: "it has no windows" if spec.window else None
    choice = choose("a_pack:attend", layers(FULL, SLIDING), "cpu")
    assert [(kind.prefill, kind.decode) for kind in choice.kinds] == [("a_pack:attend",) * 2, ("eager",) * 2]
    with pytest.raises(UnsupportedError, match=r"serves no layer.*no windows"):
        choose("a_pack:attend", layers(SLIDING), "cpu")


@pytest.mark.parametrize(
    ("asked", "spec", "platform", "reason"),
    [
        ("splash_attention", FULL, "gpu", "a kernel for TPUs"),
        ("splash_attention", ALIBI, "tpu", "ALiBi"),
        ("xla_flash_attention", SLIDING, "tpu", "no windows"),
        ("xla_flash_attention", replace(FULL, logit_softcap=30.0), "tpu", "no softcap"),
        ("xla_flash_attention", replace(FULL, sinks=True), "tpu", "no sinks"),
    ],
)
def test_an_implementation_that_serves_no_layer_is_refused(
    asked: str, spec: AttentionSpec, platform: str, reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=rf"{asked}.*serves no layer.*{reason}.*use auto or eager"):
        choose(asked, layers(spec, spec), platform)


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "splash"])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(PluginError, match=f"{name}.*auto, eager, xla_flash_attention, splash_attention"):
        choose(name, layers(FULL), "tpu")


# Settings


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sa_blok_q": 512}, "'sa_blok_q'.*sa_block_q,.*sa_q_layout"),
        ({"sa_block_q": 500}, "sa_block_q=500.*multiple of 128"),
        ({"sa_block_kv": True}, "sa_block_kv=True.*multiple of 128"),
        ({"sa_block_kv": 512, "sa_block_kv_compute": 384}, "sa_block_kv=512 and sa_block_kv_compute=384.*multiple"),
        ({"sa_block_kv_dkv": 128, "sa_block_kv_dkv_compute": 256}, "sa_block_kv_dkv=128.*multiple"),
        ({"sa_k_layout": "HEAD_MINOR"}, "sa_k_layout='HEAD_MINOR'.*HEAD_DIM_MINOR or SEQ_MINOR"),
        ({"sa_use_fused_bwd_kernel": 1}, "sa_use_fused_bwd_kernel=1.*True or False"),
        ({"sa_block_q": [512]}, "numbers, switches and words"),
        (["sa_block_q"], "mapping.*'sa_block_q': 1024"),
    ],
    ids=str,
)
@pytest.mark.parametrize("asked", ["auto", "splash_attention"])
def test_settings_that_the_splash_kernel_does_not_have_are_refused(asked: str, config: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        choose(asked, layers(FULL), "cpu", config=config)


@pytest.mark.parametrize("asked", ["eager", "xla_flash_attention"])
def test_settings_for_an_implementation_that_has_none_are_refused(asked: str) -> None:
    with pytest.raises(RequestError, match=r"sa_block_q.*no settings.*splash_attention"):
        choose(asked, layers(FULL), "cpu", config={"sa_block_q": 512})


def test_settings_become_a_value_that_does_not_depend_on_their_order() -> None:
    one = choose("splash_attention", layers(FULL), "cpu", config={"sa_block_q": 256, "sa_block_kv": 512})
    other = choose("splash_attention", layers(FULL), "cpu", config={"sa_block_kv": 512, "sa_block_q": 256})
    assert one == other and hash(one) == hash(other)


# Blocks


@pytest.mark.parametrize("length", [1, 127, 128, 640, 1664, 2100, 2176, 8192, 8704, 131072])
def test_blocks_divide_the_padded_sequence_and_are_at_least_half_of_what_is_wanted(length: int) -> None:
    wanted = dict.fromkeys(BLOCKS, 512) | {"sa_block_q": 2048, "sa_block_kv_dkv": 1024}
    padded, blocks = fit(length, wanted)
    assert padded >= length and padded % 128 == 0
    for name, block in blocks.items():
        assert padded % block == 0 and block % 128 == 0
        assert min(wanted[name], padded) / 2 <= block <= wanted[name]
    assert all(blocks[fetched] % blocks[compute] == 0 for compute, fetched in COMPUTE_OF.items())


def test_blocks_that_divide_the_sequence_are_taken_as_asked_for() -> None:
    asked = {"sa_block_q": 1024, "sa_block_kv": 2048, "sa_block_kv_compute": 256}
    blocks = splash_blocks(AttentionContext(options=tuple(asked.items())), 8192, head_bytes=1024, reach=600)
    assert blocks.length == 8192
    assert asked.items() <= dict(blocks.sizes).items()


def test_default_blocks_are_no_wider_than_a_window_and_narrower_for_wide_heads() -> None:
    default, windowed, wide = (
        dict(splash_blocks(AttentionContext(), 8192, head_bytes, reach).sizes)
        for head_bytes, reach in ((256, None), (256, 100), (4096, None))
    )
    assert set(default.values()) == set(windowed.values()) == {512}
    assert {wide[name] for name in ("sa_block_q", "sa_block_q_dkv", "sa_block_q_dq")} == {256}  # 1 MiB of 4 KiB rows


@pytest.mark.tpu_compile
def test_queries_of_a_causal_sequence_are_in_four_blocks_or_more_unless_they_get_too_small() -> None:
    context = AttentionContext(mesh=Mesh(np.asarray(tpu_topology("v5e:2x4").devices), ("data",)))
    for length, size in ((512, 512), (2048, 512), (4096, 1024), (8192, 2048), (32768, 2048)):
        blocks = dict(splash_blocks(context, length, 256, causal=True).sizes)
        assert {blocks[name] for name in QUERY_BLOCKS} == {size}
        assert blocks["sa_block_kv"] == 512
    assert dict(splash_blocks(context, 2048, 256).sizes)["sa_block_q"] == 2048


@pytest.mark.parametrize(("behind", "ahead"), [(None, 0), (0, 0), (130, 0), (300, 300), (None, None), (None, 5)])
def test_the_mask_tells_the_kernel_of_each_block_whether_all_some_or_none_of_it_is_visible(
    behind: int | None, ahead: int | None
) -> None:
    from ttpu_jax.ops.attention.mask import ALL, NONE, SOME, Band

    length, block = 512, 128
    mask = Band(length, behind, ahead)
    queries, keys = np.arange(length)[:, None], np.arange(length)[None]
    dense = (queries - keys <= (length if behind is None else behind)) & (
        keys - queries <= (length if ahead is None else ahead)
    )
    assert hasattr(mask, "mask_function") == (not dense.all())
    if hasattr(mask, "mask_function"):
        assert (mask.mask_function(queries, keys) == dense).all()
    for row in range(0, length, block):
        for column in range(0, length, block):
            place = slice(row, row + block), slice(column, column + block)
            expected = ALL if dense[place].all() else SOME if dense[place].any() else NONE
            assert mask[place] is expected


# Attending


def inputs(queries: int, keys: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Queries, keys, values and both positions; the queries are the last of the keys' tokens."""
    shapes = (2, queries, 2, 2, 8), (2, 2, keys, 8), (2, 2, keys, 8)
    query, key, value = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))
    places = jnp.broadcast_to(jnp.arange(keys), (2, keys))
    return query, key, value, places[:, keys - queries :], places


@pytest.mark.parametrize(("queries", "keys", "own"), [(1, 40, False), (8, 40, False), (40, 40, False), (1, 40, True)])
@pytest.mark.parametrize("name", ["splash_attention", "xla_flash_attention"])
def test_reading_a_cache_is_the_references_work(name: str, queries: int, keys: int, own: bool) -> None:
    context = AttentionContext(own_keys=own)
    assert IMPLEMENTATIONS[name].serves(FULL, context, queries, keys) is not None
    arrays = inputs(queries, keys)
    assert (attend(name, *arrays, FULL, context=context) == eager(*arrays, FULL, context=context)).all()


def test_a_function_named_by_an_import_string_is_called(pack: ModuleType) -> None:
    assert (attend("a_pack:attend", *inputs(4, 4), FULL, context=AttentionContext()) == 7).all()


def test_a_segment_of_a_packed_row_is_attended_to_as_if_it_were_alone() -> None:
    query, key, value, positions, _ = inputs(300, 300)  # long enough for the reference's blocks
    segments = jnp.where(positions < 200, 0, 1)
    restarted = jnp.where(positions < 200, positions, positions - 200)
    packed = eager(query, key, value, restarted, restarted, SLIDING, segment_ids=(segments, segments))
    alone = eager(
        query[:, 200:], key[:, :, 200:], value[:, :, 200:], restarted[:, 200:], restarted[:, 200:], SLIDING
    )
    np.testing.assert_allclose(packed[:, 200:], alone, atol=1e-6)


# The backend


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("attention") / "llama", tokenizer=False, vocab_size=260)


@pytest.mark.parametrize(
    "arguments",
    [
        {"attn_implementation": "splash_attention", "attention_config": {"sa_block_q": 128}},
        {"attn_implementation": "splash_attention", "mesh": "data=2,tensor=2"},
        {"attn_implementation": "xla_flash_attention"},
    ],
    ids=str,
)
def test_a_model_generates_the_same_with_a_kernel(checkpoint: Path, arguments: dict[str, Any]) -> None:
    prompts = [list(b"The quick brown fox"), list(b"A")]
    expected = AutoModelForTPU.from_pretrained(checkpoint).generate(prompts, max_new_tokens=4, ignore_eos=True)
    model = AutoModelForTPU.from_pretrained(checkpoint, **arguments)
    assert (model.generate(prompts, max_new_tokens=4, ignore_eos=True) == expected).all()


@pytest.mark.parametrize(
    "arguments",
    [{"attn_implementation": "sdpa"}, {"attention_config": {"block_q": 512}}, {"attention_config": 512}],
    ids=str,
)
def test_a_model_is_not_loaded_with_attention_that_cannot_be_had(checkpoint: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(TTPUError, match=r"sdpa|block_q|512"):
        AutoModelForTPU.from_pretrained(checkpoint, **arguments)


def test_the_plan_says_what_serves_each_kind_of_layer_here_and_on_a_tpu(checkpoint: Path) -> None:
    kernels = JaxBackend().kernels(default_registry().architecture(open_checkpoint(checkpoint).config))
    words = kernels["attention (full)"]
    assert words.startswith("eager: the reference implementation")
    assert "On a TPU: splash_attention for prefill and training, eager for decode: the default on a TPU" in words
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    wide = ModelConfig.from_dict({**config, "head_dim": 128})
    words = JaxBackend().kernels(default_registry().architecture(wide))["attention (full)"]
    assert "splash_attention for prefill and training, decode_attention for decode" in words


def test_the_plan_for_a_mesh_that_cuts_the_sequence_says_that_keys_are_gathered(checkpoint: Path) -> None:
    architecture = default_registry().architecture(open_checkpoint(checkpoint).config)
    (words,) = JaxBackend().planned_kernels(architecture, shards_sequence=True).values()
    expected = "splash_attention for prefill and training, eager for decode: the default on a TPU; the keys"
    assert words.startswith(expected)


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5])
def test_a_cpu_multiplies_few_queries_of_a_head_one_after_the_other(queries: int) -> None:
    """Each query's result is that of a TPU's one product, whichever of its head it is; more queries are one product."""
    spec = AttentionSpec(num_heads=2 * queries, num_kv_heads=2, head_dim=8)
    random = np.random.default_rng(0)
    query = jnp.asarray(random.normal(size=(3, 1, 2, queries, 8)), jnp.float32)
    key, value = (jnp.asarray(random.normal(size=(3, 2, 16, 8)), jnp.float32) for _ in range(2))
    last, places = jnp.full((3, 1), 11), jnp.broadcast_to(jnp.arange(16), (3, 16))

    def attended(platform: str, query: jax.Array) -> jax.Array:
        return eager(query, key, value, last, places, spec, context=AttentionContext(platform=platform))

    np.testing.assert_allclose(attended("cpu", query), attended("tpu", query), atol=2e-6)
    products = str(jax.make_jaxpr(lambda query: attended("cpu", query))(query)).count("dot_general")
    assert products == 1 + (queries if queries <= FEW_QUERIES else 1)


@pytest.mark.parametrize(
    ("queries", "keys", "seq"), [(1, 16, 1), (3, 256, 1), (4, 384, 2), (2, 256, 70), (1, 150, 150)]
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_on_a_cpu_is_that_of_a_tpu_in_float32(
    queries: int, keys: int, seq: int, dtype: Any, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode step, one of several tokens, a prompt after others, and one of its own. What is bfloat16 is multiplied
    as it is, and only the result is rounded."""
    monkeypatch.setattr(reference, "multiplies_bfloat16", lambda: True)
    spec = AttentionSpec(num_heads=2 * queries, num_kv_heads=2, head_dim=8)
    random = np.random.default_rng(0)
    query = jnp.asarray(random.normal(size=(3, seq, 2, queries, 8)), dtype)
    key, value = (jnp.asarray(random.normal(size=(3, 2, keys, 8)), dtype) for _ in range(2))
    places = jnp.arange(keys) - jnp.array([0, 3, 9])[:, None]  # two rows are padded on the left
    logits = jnp.asarray(random.normal(size=(2, queries)), jnp.float32) if sinks else None
    logits = logits if logits is None else logits.at[0, 0].set(200.0)  # before which all scores vanish

    def attended(platform: str, *arrays: jax.Array) -> jax.Array:
        context = AttentionContext(platform=platform)
        return eager(*arrays, places[:, -seq:], places, spec, sinks=logits, context=context)

    found = attended("cpu", query, key, value)
    expected = attended("tpu", *(one.astype(jnp.float32) for one in (query, key, value)))
    assert found.dtype == dtype
    seen = places[:, -seq:] >= 0
    few = seq * queries <= reference.FEW_ROWS
    rounds = {"rtol": 2**-8, "atol": 1e-5 if few else 1e-2}  # for many queries, the weights of values too
    tolerance = {"atol": 2e-6} if dtype == jnp.float32 else rounds
    np.testing.assert_allclose(found.astype(jnp.float32)[seen], expected[seen], **tolerance)
    assert np.isfinite(found.astype(jnp.float32)).all()
    products = str(jax.make_jaxpr(lambda *arrays: attended("cpu", *arrays))(query, key, value))
    assert ("reduce_precision" in products) == (few and dtype == jnp.bfloat16 and keys % 128 == 0)
    if dtype == jnp.bfloat16 and keys % 128 == 0:
        assert f"f32[3,2,{keys},8]" not in products


def test_a_cpu_without_instructions_for_bfloat16_multiplies_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "multiplies_bfloat16", lambda: False)
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8)
    arrays = [jnp.zeros(shape, jnp.bfloat16) for shape in ((1, 1, 1, 2, 8), (1, 1, 128, 8), (1, 1, 128, 8))]
    places = jnp.arange(128)[None]
    found = jax.make_jaxpr(lambda *arrays: eager(*arrays, places[:, -1:], places, spec))(*arrays)
    assert str(found).count("f32[1,1,128,8] = convert_element_type") == 2


@pytest.mark.parametrize("wide", ["query", "key", "value"])
def test_a_cpu_multiplies_what_is_partly_float32_in_float32(wide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "multiplies_bfloat16", lambda: True)
    spec, random = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8), np.random.default_rng(0)
    shapes = {"query": (1, 1, 1, 2, 8), "key": (1, 1, 128, 8), "value": (1, 1, 128, 8)}
    arrays = {name: jnp.asarray(random.normal(size=shape), jnp.bfloat16) for name, shape in shapes.items()}
    arrays[wide] = jnp.asarray(random.normal(size=shapes[wide]), jnp.float32)
    places = jnp.arange(128)[None]
    found = eager(*arrays.values(), places[:, -1:], places, spec, context=AttentionContext(platform="cpu"))
    exact = (one.astype(jnp.float32) for one in arrays.values())
    expected = eager(*exact, places[:, -1:], places, spec, context=AttentionContext(platform="tpu"))
    tolerance = 2e-6 if wide == "query" else 2**-8
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=tolerance, rtol=tolerance)
    jaxpr = jax.make_jaxpr(
        lambda *given: eager(*given, places[:, -1:], places, spec, context=AttentionContext(platform="cpu"))
    )(*arrays.values())
    assert str(jaxpr).count("f32[1,1,128,8] = convert_element_type") >= (2 if wide == "query" else 1)
