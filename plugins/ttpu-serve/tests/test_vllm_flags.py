"""vLLM's command lines start the same server here: flags with another name or form are translated, those without effect
are noted, and those that are not served are refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from typer.main import get_command
from typer.testing import CliRunner

from ttpu_core.cli.main import app as ttpu
from ttpu_core.errors import RequestError
from ttpu_serve.cli.compile import app as compile_app
from ttpu_serve.cli.serve import app
from ttpu_serve.cli.vllm_arguments import rewritten
from ttpu_serve.cli.vllm_flags import IGNORED, PARALLEL, REFUSED, RENAMED, SAME, SHORT, number

command: Any = get_command(app)
SWITCHES = frozenset({"--access-log", "--enable-admin", "--no-page", "--quiet", "-q", "--help", "--strict-fields"})


def read(*words: str) -> list[str]:
    """What `ttpu serve` makes of words, without notes."""
    return rewritten(words, SWITCHES)


def parsed(*words: str) -> dict[str, Any]:
    """The parameters that the command gets."""
    return dict(command.make_context("serve", list(words)).params)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("m -tp 4", "--parallelism-strategy tensor=4 m"),
        ("m --tensor_parallel_size=4 -dp 1 --pipeline-parallel-size 1", "--parallelism-strategy tensor=4 m"),
        ("m -tp 1", "m"),
        ("m -tp 4 -ep", "--parallelism-strategy tensor=4 --sharding-rules expert=tensor m"),
        ("m -ep --mesh tensor=4", "--sharding-rules expert=tensor m --mesh tensor=4"),
        ("m -ep -tp 1", "m"),
        ("m --enable-expert-parallel", "m"),
        ("m -tp 4 --no-enable-expert-parallel", "--parallelism-strategy tensor=4 m"),
        ("--model m", "--weights-dir m"),
        ("m --gpu-memory-utilization 0.5", "m --memory-utilization 0.5"),
        ("m --kv-cache-memory-bytes 3G", "m --kv-cache-memory 3"),
        ("m --max-model-len 8k", "m --max-model-len 8000"),
        ("m --max_model_len=8K --max-num-seqs 16", "m --max-model-len 8192 --max-num-seqs 16"),
        ("m --max-model-len -1", "m"),
        ("m --dtype half --kv-cache-dtype fp8_e4m3", "m --dtype float16 --kv-cache-dtype fp8"),
        ("m --quantization awq", "m"),
        ("m --quantization fp8", "m --quantization fp8"),
        ("m --enable-prefix-caching --no-enable-chunked-prefill", "m --no-chunked-prefill"),
        ("m --enable-lora --max-loras 3 --max-lora-rank 8", "m --max-adapters 3 --max-lora-rank 8"),
        ("m --enable-lora", "m --max-adapters 1"),
        ("--enable-lora m --lora-modules a=1 b=2", "m --lora-modules a=1 --lora-modules b=2"),
        ("m --enable-lora a=1", "m --enable-lora a=1"),
        ('m --lora-modules {"name":"a","path":"1","base_model_name":"m"}', "m --lora-modules a=1"),
        ("m --served-model-name a b --port 1", "m --served-model-name a --served-model-name b --port 1"),
        ("--model m --served-model-name a b", "--weights-dir m --served-model-name a --served-model-name b"),
        ("--served-model-name a m", "--served-model-name a m"),
        ('m --allowed-origins ["*"]', "m --allowed-origin *"),
        ("m --scheduling-policy priority", "m --allow-priority"),
        ("m -O3 --enforce-eager --disable-log-requests --seed 0", "m"),
        ("m --uvicorn-log-level trace --generation-config vllm", "m --log-level debug --generation-config none"),
        ("m -q --access-log --host 0.0.0.0", "m -q --access-log --host 0.0.0.0"),
        ("-- --odd", "-- --odd"),
    ],
)
def test_a_command_line_of_vllm_means_the_same_here(words: str, meant: str) -> None:
    assert read(*words.split()) == meant.split()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("m --trust-remote-code", "never run here"),
        ("m -tp 4 -ep --sharding-rules expert=none", "--enable-expert-parallel and --sharding-rules were both given"),
        ("m -ep --plan p.json", "--enable-expert-parallel and --plan were both given"),
        ("m -tp 4 -ep=1", "takes no value"),
        ("m --hf-overrides {}", "config.json"),
        ("m -dp 2", "a server for each replica"),
        ("m -pp 2", "without stages"),
        ("m -tp two", "a number of devices"),
        ("m -tp 2 --mesh tensor=2", "two ways to say one"),
        ("m --enforce-eager=true", "takes no value"),
        ("m --gpu-memory-utilization", "without a value"),
        ("m --load-format dummy", "auto or safetensors"),
        ('m --lora-modules {"name":"a"}', "name and path"),
        ("m --config", "without a value"),
        ("m --config /nowhere.yaml", "cannot be read"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(words: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read(*words.split())


def test_every_flag_of_the_tables_does_what_its_table_says() -> None:
    own = {name for option in command.params for name in option.opts}
    assert set(SAME) <= own
    for flag, renamed in RENAMED.items():
        value = {"--dtype": "half", "--scheduling-policy": "priority", "--uvicorn-log-level": "trace"}.get(flag, "2")
        value = {"--generation-config": "vllm", "--kv-cache-dtype": "fp8_e4m3"}.get(flag, value)
        words = ["m", flag] if renamed.takes == "nothing" else ["m", flag, value]
        made = read(*(words[1:] if flag == "--model" else words))
        assert {word for word in made if word.startswith("--")} <= own, flag
        assert parsed(*(words[1:] if flag == "--model" else words))
    for flag, ignored in IGNORED.items():
        notes: list[str] = []
        values = ignored.values or ("1",)
        words = ["m", flag] if ignored.takes == "nothing" else ["m", flag, values[0]]
        assert rewritten(words, SWITCHES, notes.append) == ["m"], flag
        assert [ignored.reason in note for note in notes] == ([] if ignored.values else [True])
    for flag in REFUSED:
        with pytest.raises(RequestError, match=flag):
            read("m", flag)
    tables = [set(table) for table in (SAME, RENAMED, IGNORED, REFUSED, PARALLEL)]
    assert sum(map(len, tables)) == len(set().union(*tables)), "a flag is in one table"
    assert not (set(IGNORED) | set(REFUSED)) & own
    assert set(SHORT.values()) <= set().union(*tables)


def test_numbers_are_read_as_vllm_reads_them() -> None:
    assert [number(text) for text in ("7", "1k", "1K", "25.6k", "2M", "x", "k", "")] == [
        7, 1000, 1024, 25600, 2**21, None, None, None,
    ]  # fmt: skip


FILE = """\
model: llama
tensor-parallel-size: 2
max_model_len: 8k
enable-prefix-caching: false
access-log: true
no-page: false
speculative-config: {method: ngram, num_speculative_tokens: 3}
served-model-name: [a, b]
host: 0.0.0.0
enable-lora: true
lora-modules:
  - {name: poet, path: ./poet}
"""


def test_a_file_of_options_is_read_as_a_command_line(tmp_path: Path) -> None:
    file = tmp_path / "llama.yaml"
    file.write_text(FILE)
    found = parsed("--config", str(file), "--host", "localhost", "--max-model-len", "64")
    assert (found["weights_dir"], found["checkpoint"], found["config"]) == ("llama", None, None)
    assert (found["host"], found["max_model_len"]) == ("localhost", 64), "the command line comes first"
    assert found["parallelism_strategy"] == "tensor=2" and found["access_log"] and not found["no_page"]
    assert found["no_prefix_caching"] and list(found["served_model_name"]) == ["a", "b"]
    assert found["speculative"] == '{"method": "ngram", "num_speculative_tokens": 3}'
    assert list(found["enable_lora"]) == ["poet=./poet"]
    named = parsed("own", f"--config={file}", "-tp", "4", "--served-model-name", "c")
    assert (named["checkpoint"], named["weights_dir"]) == ("own", None)
    assert (named["parallelism_strategy"], list(named["served_model_name"])) == ("tensor=4", ["c"])


def test_a_servers_file_is_one_for_compiling_as_well(tmp_path: Path) -> None:
    file = tmp_path / "llama.yaml"
    file.write_text(FILE + "port: 80\nenable-log-requests: true\nseed: 3\nuvicorn-log-level: trace\n")
    compiling: Any = get_command(compile_app)
    found = compiling.make_context("compile", ["--config", str(file), "--max-logprobs", "3"]).params
    assert (found["weights_dir"], found["max_model_len"], found["max_logprobs"]) == ("llama", 8000, 3)
    assert found["parallelism_strategy"] == "tensor=2" and list(found["enable_lora"]) == ["poet=./poet"]
    with pytest.raises(Exception, match="No such option"):
        compiling.make_context("compile", ["m", "--port", "80"])
    for text, said in (("prot: 80", "prot, .*did you mean .port"), ("quite_other: 80", "quite_other, .*--help")):
        file.write_text(text)
        with pytest.raises(RequestError, match=f"{file} has {said}"):
            compiling.make_context("compile", ["m", "--config", str(file)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "holds no options"),
        ("a: [", "cannot be read"),
        ("port: true", "takes a value"),
        ("access-log: 3", "true or false"),
        ("config: b.yaml", "names another"),
        ("trust-remote-code: true", "never run here"),
    ],
)
def test_a_file_that_means_nothing_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(RequestError, match=said):
        read("--config", str(tmp_path / "a.yaml"))


def test_refusals_and_notes_of_the_command_are_one_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded."""
    served: list[Any] = []
    monkeypatch.setattr("ttpu_serve.cli.serve._app", lambda name, *given: served.append(given))
    monkeypatch.setattr("ttpu_serve.server.run.run", lambda *_, **__: None)
    llama = str(tiny.llama_checkpoint(tmp_path))
    refused = CliRunner().invoke(ttpu, ["serve", llama, "--trust-remote-code"])
    assert refused.exit_code == 2 and refused.stderr.startswith("error: --trust-remote-code") and not served
    unknown = CliRunner().invoke(ttpu, ["serve", llama, "--made-up", "3"])
    assert unknown.exit_code == 2 and "No such option" in unknown.stderr
    for variables in ("3", "{", '{"tokenize": true}'):
        refused = CliRunner().invoke(ttpu, ["serve", llama, "--default-chat-template-kwargs", variables])
        assert refused.exit_code == 2 and "JSON object of the template's own variables" in refused.stderr
    asked = ["--port", "0", "--gpu-memory-utilization", "0.5", "--enforce-eager", "--max-logprobs", "3"]
    asked += ["--root-path", "/llama", "--tokenizer", "other", "--strict-fields", "--metrics-prefix", "vllm"]
    asked += ["--default-chat-template-kwargs", '{"enable_thinking": false}']
    done = CliRunner().invoke(ttpu, ["serve", llama, *asked])
    assert done.exit_code == 0, done.output
    assert done.stderr == "note: --enforce-eager has no effect: programs are always compiled.\n"
    settings, arguments, _, tokenizer, tracer = served[0]
    assert (arguments["memory_utilization"], arguments["max_logprobs"]) == (0.5, 3)
    assert settings.chat_template_kwargs == {"enable_thinking": False} and settings.strict_fields
    assert (settings.metrics_prefix, settings.root_path, tokenizer, tracer) == ("vllm", "/llama", "other", None)
