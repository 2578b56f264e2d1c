"""What the TPU compiler says of the shared decoder, for slices that are not there."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from ttpu_core.architecture import Architecture
from ttpu_core.checkpoint import open_config
from ttpu_core.config import ModelConfig
from ttpu_core.errors import PlanError, RequestError, UnsupportedError
from ttpu_core.loading import planned_architecture
from ttpu_core.registry import default_registry
from ttpu_core.sharding.hardware import parse_topology
from ttpu_core.sharding.parallelism import strategy_with
from ttpu_core.sharding.strategy import DEFAULT_STRATEGY
from ttpu_core.spec import AttentionSpec
from ttpu_core.spec.kernel_format import KernelFormat
from ttpu_jax.aot.report import ProgramReport, compile_report
from ttpu_jax.aot.topology import GIB
from ttpu_jax.cli.compile_report import compile_report as command
from ttpu_plan.plan_file import save_plan
from ttpu_plan.planner import Request, plans

LLAMA_8B = Path(__file__).parents[3] / "examples" / "configs" / "llama-3.1-8b.json"

LAYERS, HIDDEN, KV_HEADS, HEAD_DIM, VOCAB = 2, 512, 8, 128, 1024
BATCH, CONTEXT = 8, 2048
SMALL = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
}
PROMPT = 512
BF16 = 2  # bytes
CACHE = 2 * LAYERS * BATCH * KV_HEADS * CONTEXT * HEAD_DIM * BF16


def architecture(**changes: int) -> Architecture:
    return default_registry().architecture(ModelConfig.from_dict({**SMALL, **changes}))


def count(report: ProgramReport, op: str) -> int:
    return sum(one.count for one in report.collectives if one.op == op)


def result_bytes(report: ProgramReport, op: str) -> int:
    return sum(one.result_bytes for one in report.collectives if one.op == op)


@pytest.fixture(scope="module", params=["unrolled", "scan"])
def decode(request: pytest.FixtureRequest) -> ProgramReport:
    pytest.importorskip("libtpu")
    return compile_report(architecture(), "v5e:2x4", batch=BATCH, context=CONTEXT, layers=request.param)


@pytest.mark.tpu_compile
def test_quantized_weights_are_read_by_the_kernel_in_a_quarter_of_the_bytes() -> None:
    pytest.importorskip("libtpu")
    dense, quantized = (
        compile_report(
            architecture(num_hidden_layers=1), "v5e:1x1", batch=BATCH, context=256, quantization=quantization
        )
        for quantization in (None, {"bits": 4, "group_size": 128, "lm_head": True})
    )
    table = VOCAB * HIDDEN * BF16
    kernels, packed = (one.argument_bytes - one.cache_bytes - table for one in (dense, quantized))
    assert packed <= 0.29 * kernels
    (products,) = (one for one in quantized.unmodelled if one.name == "weight_only_product")
    assert products.count == 4 + 1
    read = pytest.approx(packed / 819e9, rel=0.1)  # and activations
    (attention,) = (one for one in quantized.unmodelled if one.name == "decode_attention")
    assert products.roofline_seconds == pytest.approx(quantized.kernel_seconds - attention.roofline_seconds)
    assert products.roofline_seconds == read


@pytest.fixture(scope="module")
def prefill() -> ProgramReport:
    pytest.importorskip("libtpu")
    return compile_report(architecture(), "v5e:2x4", task="prefill", batch=1, context=PROMPT)


@pytest.mark.tpu_compile
def test_devices_share_the_stream_of_a_prompt_whose_products_round_their_inputs() -> None:
    pytest.importorskip("libtpu")
    program = compile_report(
        architecture(), "v6e:2x2", task="prefill", batch=1, context=PROMPT, layers="scan", quantization="w8a8"
    )
    assert count(program, "reduce-scatter") == 2 * LAYERS
    integers, rows = 2 * LAYERS * PROMPT * HIDDEN, PROMPT * HIDDEN * BF16
    # Of bfloat16 the former would be twice as many bytes.
    assert integers <= result_bytes(program, "all-gather") < 1.1 * integers + rows


@pytest.mark.tpu_compile
@pytest.mark.parametrize("slice_name", ["v5e:2x4", "v6e:2x4"])
def test_heads_of_64_are_decoded_by_the_kernel_and_their_cache_is_not_copied(slice_name: str) -> None:
    program = compile_report(architecture(head_dim=64), slice_name, batch=BATCH, context=CONTEXT)
    assert {one.name: one.count for one in program.unmodelled} == {"decode_attention": LAYERS, "gather_fusion": 1}
    assert program.cache_in_place and program.temp_bytes < program.cache_bytes // 2


@pytest.mark.tpu_compile
class TestDecode:
    def test_each_device_holds_an_eighth_of_the_weights_and_of_the_cache(self, decode: ProgramReport) -> None:
        assert decode.mesh == (("tensor", 8),)
        assert decode.cache_bytes == CACHE // 8
        norms = (2 * LAYERS + 1) * HIDDEN * BF16  # whole on every device
        weights = (decode.num_parameters * BF16 - norms) // 8 + norms
        assert decode.argument_bytes == pytest.approx(weights + CACHE // 8, abs=8192)  # tokens, lengths, tiles

    def test_the_cache_is_updated_in_place_and_never_copied(self, decode: ProgramReport) -> None:
        assert decode.cache_in_place
        assert decode.aliased_bytes == pytest.approx(decode.cache_bytes, abs=4096)
        assert decode.temp_bytes < decode.cache_bytes // 2

    def test_a_layer_is_reduced_twice_and_the_embedding_once(self, decode: ProgramReport) -> None:
        assert count(decode, "all-reduce") == 2 * LAYERS + 1
        assert result_bytes(decode, "all-reduce") == (2 * LAYERS + 1) * BATCH * HIDDEN * BF16

    def test_only_the_likeliest_token_of_each_part_of_the_vocabulary_is_gathered(self, decode: ProgramReport) -> None:
        assert {one.op for one in decode.collectives} == {"all-reduce", "all-gather"}
        assert result_bytes(decode, "all-gather") <= 8 * BATCH * 4 * 2  # a value and an index from each device

    def test_what_the_prediction_leaves_out_is_named(self, decode: ProgramReport) -> None:
        """The kernel that reads the cache writes it too."""
        kernels = {} if decode.layers == "scan" else {"decode_attention": LAYERS}
        writes = {"scatter_fusion": 2 * LAYERS} if decode.layers == "scan" else {}
        assert {one.name: one.count for one in decode.unmodelled} == {"gather_fusion": 1} | writes | kernels
        assert (decode.kernel_seconds > 0) == bool(kernels)
        assert decode.loops_without_trip_count == 0

    def test_the_prediction_is_above_the_roofline(self, decode: ProgramReport) -> None:
        table = VOCAB * HIDDEN * BF16  # of which a row a token is read
        read = (decode.num_parameters * BF16 - table + CACHE) / 8
        assert decode.roofline_seconds == pytest.approx(read / 819e9, rel=0.01)
        assert decode.roofline_seconds <= decode.hbm_seconds < decode.total_seconds
        assert decode.predicted_seconds + decode.kernel_seconds > decode.roofline_seconds
        assert decode.tokens_per_second == pytest.approx(BATCH / decode.total_seconds)

    def test_the_parts_of_the_model_add_up_to_the_prediction(self, decode: ProgramReport) -> None:
        parts = {one.part: one for one in decode.parts}
        expected = {"embedding", "norm", "attention_projections", "rope", "attention", "mlp", "head"}
        assert expected <= set(parts), "each part has an operation of its own"
        whole = sum(one.seconds for one in decode.parts)
        assert whole == pytest.approx(decode.predicted_seconds + decode.kernel_seconds, rel=0.01)
        other = parts["other"].breakdown.compute if "other" in parts else 0.0
        assert other < 0.1 * whole, "nearly all operations belong to a part"
        assert [one.seconds for one in decode.parts] == sorted((one.seconds for one in decode.parts), reverse=True)
        both = parts["mlp"].breakdown, parts["attention_projections"].breakdown
        assert sum(of.collective + of.collective_wait for of in both) > 0, "sums over the devices follow products"

    def test_it_says_what_compiled_it(self, decode: ProgramReport) -> None:
        assert decode.jax_version[0].isdigit()
        assert decode.libtpu_version[0].isdigit()
        assert decode.compile_seconds > 0 and decode.compile_cpu_seconds > 0


@pytest.mark.tpu_compile
class TestMeshes:
    @pytest.mark.parametrize("layers", ["unrolled", "scan"])
    def test_cutting_the_batch_too_gathers_no_weights(self, layers: str) -> None:
        pytest.importorskip("libtpu")
        mesh = {"data": 2, "tensor": 4}
        report = compile_report(
            architecture(),
            "v5e:2x4",
            batch=BATCH,
            context=CONTEXT,
            mesh=mesh,
            layers=layers,  # type: ignore[arg-type]
        )
        assert report.cache_bytes == CACHE // 8
        assert report.cache_in_place
        assert report.temp_bytes < report.cache_bytes // 2
        assert count(report, "all-reduce") == 2 * LAYERS
        rows = BATCH // 2 * HIDDEN * BF16  # of the table, whose features four devices share
        assert rows <= result_bytes(report, "all-gather") <= rows + 8 * BATCH * 4 * 2

    def test_one_chip_talks_to_nobody(self) -> None:
        pytest.importorskip("libtpu")
        report = compile_report(architecture(num_hidden_layers=1), "v6e:1x1", batch=BATCH, context=CONTEXT)
        assert report.collectives == ()
        assert report.cache_bytes == CACHE // LAYERS

    def test_more_devices_than_kv_heads_hold_replicas_of_them(self) -> None:
        pytest.importorskip("libtpu")
        scarce = architecture(num_key_value_heads=2)
        report = compile_report(scarce, "v5e:2x4", batch=BATCH, context=CONTEXT)
        assert report.num_parameters == scarce.spec.num_parameters
        assert report.cache_bytes == CACHE // 8  # of the eight KV heads that the devices need
        assert count(report, "all-reduce") == 2 * LAYERS + 1


@pytest.mark.tpu_compile
class TestPrefill:
    def test_the_prompt_goes_into_the_cache_that_was_given(self, prefill: ProgramReport) -> None:
        assert prefill.tokens == prefill.context == PROMPT
        assert prefill.cache_bytes == CACHE // BATCH * PROMPT // CONTEXT // 8
        assert prefill.cache_in_place

    def test_only_the_last_tokens_logits_are_computed(self, prefill: ProgramReport) -> None:
        # The embedding and all layers but the last exchange every token; the last layer's two exchanges carry one,
        # which ops.linear doubles.
        layers = ((2 * (LAYERS - 1) + 1) * PROMPT + 2 * 2) * HIDDEN * BF16
        assert result_bytes(prefill, "all-reduce") == pytest.approx(layers, abs=1024)  # the rest is the argmax
        assert prefill.temp_bytes < PROMPT * VOCAB * 4  # less than all tokens' logits

    def test_the_roofline_is_that_of_the_products(self, prefill: ProgramReport) -> None:
        layer = 3 * 1024 * HIDDEN + (16 + 2 * KV_HEADS + 16) * HEAD_DIM * HIDDEN
        assert prefill.roofline_seconds == pytest.approx(2 * LAYERS * layer * PROMPT / 8 / 197e12)
        assert prefill.roofline_seconds < prefill.predicted_seconds
        assert prefill.tokens_per_second == pytest.approx(PROMPT / prefill.total_seconds)


@pytest.mark.tpu_compile
class TestRings:
    """A long prompt on four devices."""

    @pytest.fixture(scope="class", params=["unrolled", "scan"])
    def programs(self, request: pytest.FixtureRequest) -> dict[str, ProgramReport]:
        pytest.importorskip("libtpu")
        asked = {"task": "prefill", "batch": 1, "context": PROMPT, "layers": request.param}
        return {
            stream: compile_report(architecture(), "v5e:2x2", **asked, residual_stream=stream)  # type: ignore[arg-type]
            for stream in ("auto", "whole")
        }

    def test_products_send_what_others_need_in_the_background(self, programs: dict[str, ProgramReport]) -> None:
        ring, whole = programs["auto"], programs["whole"]
        sent = [one for one in ring.collectives if one.op == "collective-permute"]
        # Rows for queries, keys and values come from either side, and one half of those opposite by each way.
        # In the MLP half of a device's rows, and then their sums, pass three devices in either direction.
        attention, mlp = 2 + 2, 2 * 2 * 3
        in_scan = LAYERS * (attention + mlp)
        expected = in_scan if ring.layers == "scan" else in_scan - mlp  # the last layer's MLP has one token
        assert sum(one.count for one in sent) == expected + 1  # and the last token's row
        assert all(one.in_background == one.count for one in sent)
        assert count(whole, "collective-permute") == 0

    def test_no_sums_of_all_rows_are_exchanged(self, programs: dict[str, ProgramReport]) -> None:
        stream = PROMPT * HIDDEN * BF16
        assert result_bytes(programs["auto"], "all-reduce") < stream / 8
        assert result_bytes(programs["auto"], "all-gather") < stream / 8
        sums = LAYERS - (programs["auto"].layers != "scan")  # of attention, but in the last layer
        assert result_bytes(programs["auto"], "reduce-scatter") == sums * stream // 4
        assert result_bytes(programs["auto"], "all-to-all") == stream // 4  # of rows of the table
        assert result_bytes(programs["whole"], "all-reduce") >= 2 * (LAYERS - 1) * stream
        assert result_bytes(programs["whole"], "all-gather") >= stream

    def test_the_prompt_goes_into_the_cache_that_was_given(self, programs: dict[str, ProgramReport]) -> None:
        assert all(one.cache_in_place for one in programs.values())


def test_a_context_that_the_model_does_not_have_is_refused() -> None:
    short = architecture(max_position_embeddings=1024)
    for task in ("decode", "prefill"):
        with pytest.raises(RequestError, match=r"context is 2,048, but this model's context holds 1,024: lower it"):
            compile_report(short, "v5e:2x4", task=task, context=2048)  # type: ignore[arg-type]
    warned = pytest.warns(UserWarning, match="context=2,048 was given, but the model's config names 1,024 positions")
    with warned, pytest.raises(UnsupportedError, match="which is 3 devices"):
        compile_report(short, "v5e:2x4", task="train", context=2048, mesh={"fsdp": 3})
    learned = replace(short, spec=replace(short.spec, embedding=replace(short.spec.embedding, positions=1024)))
    with pytest.raises(RequestError, match=r"has learned 1,024 positions, and training adds none: lower it"):
        compile_report(learned, "v5e:2x4", task="train", context=2048)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"context": 0}])
def test_an_empty_batch_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(RequestError, match="must be at least 1"):
        compile_report(architecture(), "v5e:2x4", **wrong)  # type: ignore[arg-type]


@pytest.mark.tpu_compile
def test_a_model_that_does_not_fit_is_refused_with_its_size() -> None:
    pytest.importorskip("libtpu")
    big = default_registry().architecture(open_config(LLAMA_8B))
    with pytest.raises(UnsupportedError, match=r"decode of llama .*'v5e:1x1', but it needs .* where 15.75 GiB"):
        compile_report(big, "v5e:1x1", layers="scan")


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.parametrize(("topology", "milliseconds"), [("v5e:2x4", 5.5)])
def test_llama_8b_decode_keeps_its_bars(topology: str, milliseconds: float) -> None:
    """The bars of all 32 layers, held by two of them: each layer takes as much as the next."""
    pytest.importorskip("libtpu")
    whole = open_config(LLAMA_8B)
    layers, of_all = 2, 32
    shallow = default_registry().architecture(whole.with_values({"num_hidden_layers": layers}))
    report = compile_report(shallow, topology, batch=32, context=2048)
    assert report.cache_bytes == GIB * layers // of_all
    assert report.cache_in_place
    assert report.temp_bytes < report.cache_bytes // 16
    assert count(report, "all-reduce") <= 2 * layers + 2
    assert result_bytes(report, "all-gather") <= 32 * 4096 * BF16 + 4096  # rows of the table, and of sampling
    held = report.num_parameters * BF16 / 8 + report.cache_bytes
    assert report.peak_bytes <= held + 0.13 * GIB  # of all layers 3.0 GiB
    # A step reads all weights but the embedding, of which it reads a row for each token, and the whole cache.
    parameters = default_registry().architecture(whole).spec.num_parameters
    table = 128_256 * 4096
    read = (((count - table) * BF16 + 8 * cache) for count, cache in (
        (report.num_parameters, report.cache_bytes), (parameters, GIB)))  # fmt: skip
    share = next(read) / next(read)
    assert report.predicted_seconds <= share * milliseconds * 1e-3


class TestCommand:
    @pytest.fixture
    def config(self, tmp_path: Path) -> Path:
        file = tmp_path / "config.json"
        # Compiles twice as fast.
        narrow = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
        file.write_text(json.dumps({**SMALL, **narrow, "num_hidden_layers": 1}))
        return file

    def run(self, *arguments: object) -> Result:
        pytest.importorskip("libtpu")
        app = typer.Typer()
        app.command()(command)
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    @pytest.mark.tpu_compile
    def test_json_is_one_document_with_a_program_for_each_task_and_slice(self, config: Path) -> None:
        result = self.run(
            config, "--topology", "v5e:1x1", "--topology", "v6e:1x1", "--context", 128, "--prefill", 64, "--json"
        )
        document = json.loads(result.stdout)
        programs = [(one["topology"], one["task"], one["batch"], one["tokens"]) for one in document["programs"]]
        assert programs == [
            ("v5e:1x1", "decode", 32, 1),
            ("v5e:1x1", "prefill", 1, 64),
            ("v6e:1x1", "decode", 32, 1),
            ("v6e:1x1", "prefill", 1, 64),
        ]
        assert all(one["cache_in_place"] and one["tokens_per_second"] > 0 for one in document["programs"])
        assert "nothing ran on a TPU" in document["note"]

    @pytest.mark.tpu_compile
    def test_the_table_says_that_nothing_ran(self, config: Path) -> None:
        result = self.run(config.parent, "--topology", "v5e:2x4", "--task", "decode", "--mesh", "data=2,tensor=4")
        assert result.exit_code == 0
        assert "nothing ran on a TPU" in " ".join(result.stdout.split())
        assert "data=2, tensor=4" in result.stdout
        assert "3 all-reduces" in result.stdout
        assert "waits for copies" not in result.stdout

    @pytest.mark.tpu_compile
    def test_it_explains_a_program_by_parts_in_a_table_and_in_a_picture(self, config: Path, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        picture = tmp_path / "parts.svg"
        asked = ("--topology", "v5e:1x1", "--context", 128, "--prefill", 64, "--task", "both")
        result = self.run(config, *asked, "--explain", "--picture", picture)
        assert result.exit_code == 0, result.exception
        for words in ("decode 32 × 128 on v5e:1x1", "prefill 1 × 64 on v5e:1x1", "waits for copies"):
            assert words in result.stdout
        rows = [line.split()[0] for line in result.stdout.splitlines() if line.split()]
        assert {"mlp", "head", "attention", "norm"} <= set(rows)
        drawn = picture.read_text(encoding="utf-8")
        assert "decode 32 × 128 on v5e:1x1" in drawn and "attention projections" in drawn

    @pytest.mark.tpu_compile
    def test_it_says_what_slices_exchange_and_how_much_of_that_is_hidden(self, config: Path) -> None:
        asked = ("--topology", "2*v6e:1x1", "--mesh", "dcn.tensor=2", "--task", "decode", "--context", 128)
        (program,) = json.loads(self.run(config, *asked, "--json").stdout)["programs"]
        exchanged = {one["op"]: one for one in program["collectives"]}
        assert exchanged["dcn-all-reduce"]["count"] == exchanged["dcn-all-reduce"]["in_background"] >= 2
        parts = program["breakdown"]
        assert 0 < parts["dcn_wait"] <= parts["dcn_in_background"] * (1 + 1e-9)
        assert sum(one["breakdown"]["dcn_wait"] for one in program["parts"]) == pytest.approx(parts["dcn_wait"])
        assert not [one for one in program["unmodelled"] if "send" in one["name"]]
        table = " ".join(self.run(config, *asked, "--explain").stdout.split())
        seconds = f"{parts['dcn_in_background'] * 1e3:.2f} ms, {parts['dcn_wait'] * 1e3:.2f} ms waited for"
        assert f"between slices {seconds}" in table and "dcn-all-reduces" in table
        assert "to and from the host" not in table and "waits for the host" not in table

    @pytest.mark.parametrize(
        ("name", "said"),
        [("parts.gif", "written as .png or .svg"), ("nowhere/parts.png", "its folder does not exist")],
    )
    def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_compiled(
        self, config: Path, tmp_path: Path, name: str, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ttpu_jax.aot.report.compile_report", lambda *_, **__: pytest.fail("it was compiled"))
        error = self.run(config, "--topology", "v5e:1x1", "--picture", tmp_path / name).exception
        assert isinstance(error, RequestError) and said in str(error)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--topology", "v5p:2x4"), "write 3 sizes"),
            (("--topology", "v5e:2x4", "--mesh", "tensor=4"), "'v5e:2x4' has 8"),
            (("--topology", "v5e:2x4", "--mesh", "heads=8"), "not an axis"),
            (("--topology", "v5e:2x4", "--dtype", "int3"), "float32, bfloat16, float16"),
            (("--topology", "v5e:2x4", "--sharding-rules", "mlp"), "'mlp' in them is not a logical axis"),
            (("--topology", "v5e:2x4", "--sharding-rules", "heads=tensor"), "logical axis 'heads'"),
            (("--topology", "v5e:2x4", "--task", "train", "--quantization", "w4a16-g128"), "they are not trained"),
            (("--topology", "v5e:2x4", "--experts", "few"), "no layer of llama has experts"),
            (("--topology", "v5e:2x4", "--mesh", "dcn.tensor=2,tensor=4"), "slices"),
        ],
    )
    def test_what_cannot_be_compiled_is_an_error_in_one_sentence(
        self, config: Path, arguments: tuple[str, ...], said: str
    ) -> None:
        error = self.run(config, *arguments).exception
        assert isinstance(error, UnsupportedError | RequestError)
        assert said in str(error)

    def test_experts_and_rules_are_those_that_were_asked_for(
        self, config: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: dict[str, Any] = {}

        def stand_in(_: Architecture, *names: object, **options: object) -> None:
            asked.update(options)
            raise RequestError("that is enough")

        monkeypatch.setattr("ttpu_jax.aot.report.compile_report", stand_in)
        rules = ("--sharding-rules", "expert=data+tensor,embed=none")
        self.run(config, "--topology", "v5e:2x4", "--experts", "grouped", *rules)
        assert asked["experts"] == "grouped"
        assert asked["strategy"] == strategy_with({"expert": ("data", "tensor"), "embed": None})
        self.run(config, "--topology", "v5e:2x4")
        assert (asked["experts"], asked["strategy"]) == ("auto", DEFAULT_STRATEGY)

    def test_slices_lie_along_the_axes_that_were_asked_for(self, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[dict[str, Any]] = []

        def stand_in(_: Architecture, *names: object, **options: object) -> None:
            asked.append(options)
            raise RequestError("that is enough")

        monkeypatch.setattr("ttpu_jax.aot.report.compile_report", stand_in)
        for mesh in ("dcn.tensor=2,data=2,tensor=4", "data=2,tensor=8"):
            self.run(config, "--topology", "2*v6e:2x4", "--mesh", mesh)
        assert [one["mesh"] for one in asked] == [{"data": 2, "tensor": 8}] * 2
        assert [one.get("slices") for one in asked] == [{"tensor": 2}, None]

    def test_no_program_has_more_tokens_than_the_model_has_positions(
        self, config: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """But to train where positions can be extended, which is warned of."""
        config.write_text(json.dumps({**SMALL, "max_position_embeddings": 1024}))
        done = self.run(config, "--topology", "v5e:2x4", "--task", "train", "--context", 2048, "--mesh", "fsdp=3")
        assert "which is 3 devices" in str(done.exception)
        (warned,) = done.stderr.splitlines()
        assert warned.startswith("warning: context=2,048 was given, but the model's config names 1,024 positions")
        asked: list[int] = []

        def stand_in(_: Architecture, *names: object, task: str, batch: int, context: int, **options: object) -> None:
            asked.append(context)
            if task == "prefill" or options.get("remat") == "none":
                raise RequestError("that is enough")

        monkeypatch.setattr("ttpu_jax.aot.report.compile_report", stand_in)
        self.run(config, "--topology", "v5e:2x4")
        assert asked == [1024, 1024]
        for option in ("--context", "--prefill"):
            error = self.run(config, "--topology", "v5e:2x4", option, 2048).exception
            assert str(error) == f"{option} is 2,048, but this model's context holds 1,024: lower it."
        assert len(asked) == 2
        self.run(config, "--topology", "v5e:2x4", "--task", "train", "--context", 2048, "--remat", "none")
        assert asked[2:] == [2048]

    def test_slices_of_a_model_without_a_plugin_are_refused(self, config: Path) -> None:
        config.write_text(json.dumps({"model_type": "xglm", "d_model": 64, "attention_heads": 2, "num_layers": 1}))
        error = self.run(config, "--topology", "2*v6e:2x4", "--mesh", "dcn.data=2,tensor=8").exception
        assert isinstance(error, RequestError)
        assert "leave out what begins with dcn." in str(error)

    def test_a_plans_mesh_and_rules_are_compiled(
        self, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[dict[str, Any]] = []

        def stand_in(_: Architecture, *names: object, **options: object) -> None:
            asked.append(options)
            raise RequestError("that is enough")

        monkeypatch.setattr("ttpu_jax.aot.report.compile_report", stand_in)
        rules, saved = strategy_with({"mlp": ("data", "tensor")}), tmp_path / "plan.json"
        spec = planned_architecture(str(config)).spec
        found = plans(spec, parse_topology("v5e:2x4"), Request("generation", strategy=rules))
        save_plan(next(one for one in found if dict(one.mesh) == {"data": 2, "tensor": 4}), saved)
        self.run(config, "--topology", "v5e:2x4", "--plan", saved)
        (options,) = asked
        assert (options["mesh"], options["slices"], options["strategy"]) == ({"data": 2, "tensor": 4}, {}, rules)
        for other in (("--mesh", "tensor=8"), ("--sharding-rules", "mlp=none")):
            error = self.run(config, "--topology", "v5e:2x4", "--plan", saved, *other).exception
            assert isinstance(error, RequestError)
            assert f"and {other[0]} were given, but a plan has a mesh and rules of its own" in str(error)
        error = self.run(config, "--topology", "v5e:2x4", "--plan", saved, "--quantization", "w8a16").exception
        assert isinstance(error, PlanError)
        assert "the plan is for bfloat16 weights" in str(error)
        assert len(asked) == 1

    @pytest.mark.parametrize(
        "given",
        [
            ("--task", "decode", "--prefill", "77"),
            ("--task", "train", "--prefill", "77"),
            ("--task", "both", "--remat", "full"),
        ],
    )
    def test_options_of_other_tasks_are_refused(self, config: Path, given: tuple[str, ...]) -> None:
        error = self.run(config, "--topology", "v5e:1x1", *given).exception
        assert isinstance(error, RequestError)
        assert f"{given[2]} was given, but it has no effect with --task {given[1]}" in str(error)

    @pytest.mark.parametrize("asked", ["auto", "whole"])
    def test_the_residual_stream_is_cut_as_asked(
        self, config: Path, asked: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found: list[object] = []

        def stand_in(*_: object, residual_stream: str, **__: object) -> None:
            found.append(residual_stream)
            raise RequestError("that is enough")

        monkeypatch.setattr("ttpu_jax.aot.report.compile_report", stand_in)
        self.run(config, "--topology", "v5e:1x1", *(() if asked == "auto" else ("--residual-stream", asked)))
        assert found == [asked]

    def test_a_quantized_checkpoint_is_compiled_in_its_own_format(
        self, config: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
        config.write_text(json.dumps({**SMALL, "quantization_config": written}))
        asked: list[Architecture] = []

        def stand_in(architecture: Architecture, *_: object, **__: object) -> None:
            asked.append(architecture)
            raise RequestError("that is enough")

        monkeypatch.setattr("ttpu_jax.aot.report.compile_report", stand_in)
        self.run(config, "--topology", "v5e:1x1")
        formats = dict(asked[0].spec.kernel_formats)
        assert len(formats) == 4 * LAYERS
        assert set(formats.values()) == {KernelFormat("int4", 128, symmetric=False)}
        monkeypatch.undo()
        error = self.run(config, "--topology", "v5e:1x1", "--quantization", "int8").exception
        assert isinstance(error, RequestError)
        assert "quantized already" in str(error)


def test_the_shipped_config_is_llama_3_1_8b() -> None:
    spec = default_registry().architecture(open_config(LLAMA_8B)).spec
    assert spec.num_parameters == 8_030_261_248
    (layer,) = set(spec.layers)
    assert isinstance(layer.mixer, AttentionSpec)
    assert (spec.num_layers, layer.mixer.num_heads, layer.mixer.num_kv_heads, layer.mixer.head_dim) == (32, 32, 8, 128)
    assert layer.mixer.rope is not None
    assert (layer.mixer.rope.type, layer.mixer.rope.theta, layer.mixer.rope.factor) == ("llama3", 500_000.0, 8.0)
