"""What the command line promises: results on stdout and nothing else there, exit statuses, one sentence for an error,
and no import of what a command does not need. A backend made for the test stands in for a real one until the end."""

import gc
import io
import json
import logging
import os
import pty
import select
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any

import pytest
import tiny
from throwaway import Distribution
from typer.testing import CliRunner

import ttpu
from ttpu_core import registry as registry_module
from ttpu_core.auto import AutoModelForTPU
from ttpu_core.cli.console import LoadProgress, in_bytes
from ttpu_core.cli.interrupts import repeat_lost_interrupts
from ttpu_core.cli.main import app
from ttpu_core.cli.parameters import made_of
from ttpu_core.default_device import leave_out_default_device
from ttpu_core.errors import RequestError, UnsupportedError
from ttpu_core.mapping import Concat, Stack, Tensor
from ttpu_core.registry import Registry, default_registry

FAKE_BACKEND = '''
import time
from types import SimpleNamespace
from ttpu_core.errors import RequestError
from ttpu_core.loading import LoadOptions

LOADS, CALLS = [], []

def event(text, token, reason=None, logprobs=None):
    top = None if logprobs is None else {token + n: -0.5 - n for n in range(logprobs)}
    return SimpleNamespace(text=text, token_id=token, logprob=None if logprobs is None else -0.5, top_logprobs=top,
                           finish_reason=reason)

class Tokenizer:
    chat_template = "{{ messages }}"
    def apply_chat_template(self, messages, **options):
        if messages[0]["content"] == "forbidden":
            raise ValueError("System role not supported")
        return {"input_ids": [0] * 10 * len(messages)}
    def decode(self, ids):
        return f"<{ids[0]}>"

class Model:
    tokenizer = Tokenizer()
    timings = SimpleNamespace(load_seconds=1.0, compile_seconds=2.0, prefill_seconds=0.5, prefill_tokens=10,
                              prefill_tokens_per_second=20.0, decode_seconds=0.25, decode_tokens=2,
                              decode_tokens_per_second=8.0)
    def __init__(self, progress):
        self.progress = progress
    def stream(self, prompt, *, logprobs=None, **arguments):
        turns = 0 if isinstance(prompt, str) else len(prompt)
        text = prompt[-1]["content"] if turns else prompt
        CALLS.append((list(prompt) if turns else prompt, arguments))
        self.progress("compile", 0.0, 1.0)
        time.sleep(0.3 if text == "slowly" else 0)
        self.progress("compile", 1.0, 1.0)
        if text == "too long":
            raise RequestError("the prompt is too long: shorten it.")
        if text == "bug":
            raise ZeroDivisionError("a bug")
        while text == "forever":
            yield event("on and ", 1)
            time.sleep(0.005)
        yield event(f"{turns}: ", 5, None, logprobs)
        yield event("", 6, None, logprobs)
        yield event(text, 7, "stop", logprobs)

class Backend:
    name = "fake"
    options = LoadOptions
    def open(self, architecture, checkpoint, options):
        progress, usual = options.progress, LoadOptions()
        given = {name: getattr(options, name) for name in options.names() if name != "progress"}
        LOADS.append({name: value for name, value in given.items() if value != getattr(usual, name)})
        if options.dtype == "slow":
            for done in (0, 50, 100):
                progress("load", done * 2**20, 100 * 2**20)
                time.sleep(0.3)
        return Model(progress or (lambda *event: None))
    def kernels(self, architecture):
        return {"attention": "fake_kernel: it is a test"}
    def doctor(self):
        return {"devices": ["fake:0"], "missing": {"libfake": "pip install libfake"}}
'''

COMMANDS = '''
import sys
from typing import Annotated
import typer

def hello(name: Annotated[str, typer.Argument(help="Whom to greet.")], loud_voice: bool = False) -> None:
    """Greet somebody."""
    print(f"HELLO {name}" if loud_voice else f"hello {name}")

def refuse() -> None:
    """Refuse."""
    from ttpu_core.errors import TTPUError
    raise TTPUError("no [bold]such\\nluck[/bold].")

not_a_command = 17
'''

RUNNER = CliRunner()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of distributions: a backend, and commands of which some are broken."""
    folder = tmp_path_factory.mktemp("site")
    distributions = (
        Distribution(
            "ttpu-fake", {"fake_backend.py": FAKE_BACKEND}, {"ttpu.backends": {"fake": "fake_backend:Backend"}}
        ),
        Distribution(
            "their-commands",
            {"their_commands.py": COMMANDS, "their_broken.py": "raise RuntimeError('no such driver')"},
            {
                "ttpu.commands": {
                    "hello": "their_commands:hello",
                    "refuse": "their_commands:refuse",
                    "broken": "their_broken:command",
                    "number": "their_commands:not_a_command",
                    "info": "their_broken:info",
                }
            },
        ),
        Distribution(
            "old-commands", {}, {"ttpu.commands": {"old": "nowhere:old"}}, requires=("ttpu-core<0.0.1",)
        ),
    )
    for distribution in distributions:
        with zipfile.ZipFile(distribution.wheel(folder)) as wheel:
            wheel.extractall(folder / "installed")
    return folder / "installed"


@pytest.fixture(autouse=True)
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process and those it starts see the throw-away distributions."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    for name in ("TTPU_PLUGINS", "TTPU_DISABLE_PLUGINS", "TTPU_PATCH_PACKS", "TTPU_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    default_registry.cache_clear()
    yield
    default_registry.cache_clear()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny llama with a chat template."""
    return tiny.llama_checkpoint(tmp_path / "model", chat=True)


@pytest.fixture
def calls() -> list[Any]:
    """The (prompt, arguments) of each call of the fake model's `stream`."""
    import fake_backend  # type: ignore[import-not-found]

    fake_backend.CALLS.clear()
    fake_backend.LOADS.clear()
    return fake_backend.CALLS  # type: ignore[no-any-return]


def run(*arguments: str | Path, status: int = 0, stdin: str | None = None) -> Any:
    """A command in this process, which must end with `status`."""
    result = RUNNER.invoke(app, [str(argument) for argument in arguments], input=stdin, prog_name="ttpu")
    assert result.exit_code == status, (result.exit_code, result.output, result.exception)
    return result


def error(*arguments: str | Path, stdin: str | None = None) -> str:
    """The sentence with which a command refuses."""
    result = run(*arguments, status=2, stdin=stdin)
    assert result.stdout == ""
    return one_sentence(result.stderr)


def one_sentence(stderr: str) -> str:
    """What stands behind "error: ", which must be all that there is."""
    assert stderr.startswith("error: ") and stderr.count("\n") == 1, stderr
    assert "Traceback" not in stderr
    return stderr.removeprefix("error: ").removesuffix("\n")


def process(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """The console script's function in a process of its own."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120, **options)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "ttpu_core.cli.main", *map(str, arguments)]


def generated(checkpoint: Path, *arguments: str, **options: Any) -> Any:
    return run("generate", checkpoint, "--backend", "fake", *arguments, **options)


# -- the whole ---------------------------------------------------------------------------------------------


def test_the_version_is_that_of_the_core() -> None:
    assert run("--version").stdout == f"ttpu {metadata.version('ttpu-core')}\n"


@pytest.mark.parametrize("name", ["list-plugins", "info", "parameters", "generate", "chat", "doctor"])
def test_every_command_has_help_with_examples(name: str) -> None:
    shown = run(name, "--help").stdout
    assert "Examples:" in shown and f"ttpu {name}" in shown


def test_the_console_script_runs_this_main() -> None:
    [script] = [point for point in metadata.entry_points(group="console_scripts") if point.name == "ttpu"]
    assert script.value == "ttpu_core.cli.main:main"


def test_listing_plugins_imports_no_framework_and_no_plugin() -> None:
    code = (
        "import sys\nfrom ttpu_core.cli.main import main\nsys.argv = ['ttpu', 'list-plugins']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = 'numpy torch jax jaxlib flax transformers ttpu_jax ttpu_llama fake_backend their_commands'.split()\n"
        "print(*[name for name in heavy if name in sys.modules], file=sys.stderr, end='')"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "ttpu-llama" in finished.stdout


@pytest.mark.parametrize("arguments", [["frobnicate"], ["info"], ["info", "--x"], ["chat", "x", "--top-p", "hot"]])
def test_a_usage_error_exits_2(arguments: list[str]) -> None:
    assert "Usage: ttpu" in run(*arguments, status=2).stderr


def test_a_bug_keeps_its_traceback(checkpoint: Path) -> None:
    finished = process("generate", checkpoint, "--backend", "fake", "-p", "bug")
    assert finished.returncode == 1
    assert "Traceback" in finished.stderr and "ZeroDivisionError: a bug" in finished.stderr


def test_a_variable_shows_the_traceback_of_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTPU_TRACEBACK", "1")
    shown = run("info", "/nowhere", status=2).stderr
    assert "Traceback" in shown and "\nerror: /nowhere was asked for" in shown


def test_ctrl_c_exits_130_without_a_traceback(checkpoint: Path) -> None:
    running = subprocess.Popen(
        command("generate", checkpoint, "--backend", "fake", "-p", "forever"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert running.stdout.read(10) == "on and on "
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=60)
    assert (running.returncode, stderr) == (130, "")
    assert stdout.endswith("\n")  # whatever comes next starts on a line of its own


def test_ctrl_c_while_garbage_is_collected_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        gc.callbacks.remove(interrupt)
        signal.raise_signal(signal.SIGINT)  # its exception ends here, as in JAX's callback

    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: told.append(dropped.exc_type))
    repeat_lost_interrupts()
    with pytest.raises(KeyboardInterrupt):
        gc.callbacks.append(interrupt)
        gc.collect()
        time.sleep(20)
    assert told == []


def test_a_pipe_that_is_closed_early_is_not_an_error_message(checkpoint: Path) -> None:
    running = subprocess.Popen(
        command("generate", checkpoint, "--backend", "fake", "-p", "forever"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None and running.stderr is not None
    running.stdout.read(1)
    running.stdout.close()
    assert running.stderr.read() == ""
    assert running.wait(60) == 141


# -- what cannot be honoured -------------------------------------------------------------------------------


def broken_config(**changes: Any) -> Callable[[Path], Path]:
    return lambda folder: tiny.llama_checkpoint(folder / "model", tokenizer=False, **changes)


def without_key(folder: Path) -> Path:
    path = broken_config()(folder)
    config = json.loads((path / "config.json").read_text())
    del config["num_attention_heads"]
    (path / "config.json").write_text(json.dumps(config))
    return path


def truncated(folder: Path) -> Path:
    path = broken_config()(folder)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return path


def only_pickles(folder: Path) -> Path:
    path = broken_config()(folder)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    return path


def weights_of_another(folder: Path) -> Path:
    path = broken_config()(folder)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    return path


BAD_INPUTS = {
    "no such directory": "nowhere",
    without_key: "has no 'num_attention_heads'",
    broken_config(model_type="gpt_of_tomorrow"): "'gpt_of_tomorrow'",
    broken_config(rope_parameters={"rope_type": "helix"}): "rope type 'helix'",
    truncated: "truncated",
    only_pickles: "pickle",
    weights_of_another: "has shape",
}


@pytest.mark.parametrize(("make", "reason"), BAD_INPUTS.items(), ids=list(BAD_INPUTS.values()))
def test_a_bad_checkpoint_is_refused_with_one_sentence_and_status_2(
    make: str | Callable[[Path], Path], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "nowhere" if isinstance(make, str) else make(tmp_path)
    # torch_xla, which ttpu-any's imports bring where it is installed, says which device it takes unless it is told.
    finished = process("info", path, env={**os.environ, "PJRT_DEVICE": "CPU"})
    assert (finished.returncode, finished.stdout) == (2, "")
    assert reason in one_sentence(finished.stderr)


def test_an_unknown_backend_is_refused_with_those_that_exist(checkpoint: Path) -> None:
    assert "fake" in error("generate", checkpoint, "--backend", "abacus", "-p", "hi")


def test_an_unknown_patch_pack_is_refused(checkpoint: Path) -> None:
    assert "'no-such-pack'" in error("generate", checkpoint, "--patch-pack", "no-such-pack", "-p", "hi")


# -- list-plugins and doctor -------------------------------------------------------------------------------


def test_list_plugins_groups_model_types_by_distribution() -> None:
    shown = run("list-plugins").stdout
    [llama] = [line.split() for line in shown.splitlines() if "ttpu-llama" in line]
    version = metadata.version("ttpu-llama")
    assert llama == ["family", "llama", "ttpu-llama", version, "llama,", "llama4,", "llama4_text", "available"]
    assert "it was built for ttpu-core<0.0.1" in shown
    [parsers] = [line.split() for line in shown.splitlines() if "tool parser" in line]
    assert parsers[:4] == ["tool", "parser", "serve", "ttpu-serve"], "they share a row too"


def test_list_plugins_as_json_has_one_object_per_entry_point() -> None:
    plugins = {(plugin["kind"], plugin["name"]): plugin for plugin in json.loads(run("list-plugins", "--json").stdout)}
    assert plugins["family", "llama"] == {
        "kind": "family",
        "name": "llama",
        "distribution": "ttpu-llama",
        "version": metadata.version("ttpu-llama"),
        "model_types": ["llama"],
        "object": "ttpu_llama.llama",
        "state": "available",
        "reason": "",
    }
    assert plugins["backend", "fake"]["model_types"] == []
    assert plugins["backend", "fake"]["object"] == "fake_backend:Backend"
    assert plugins["command", "old"]["state"] == "incompatible"


def test_a_command_that_a_built_in_hides_is_shown_as_such() -> None:
    plugins = json.loads(run("list-plugins", "--json").stdout)
    [hidden] = [plugin for plugin in plugins if (plugin["kind"], plugin["name"]) == ("command", "info")]
    assert hidden["state"] == "conflict" and "ttpu's own" in hidden["reason"]


def test_check_imports_each_plugin_and_exits_1_if_one_is_broken() -> None:
    plugins = json.loads(run("list-plugins", "--check", "--json", status=1).stdout)
    states = {(plugin["kind"], plugin["name"]): (plugin["state"], plugin["reason"]) for plugin in plugins}
    assert states["family", "llama"] == ("loaded", "")
    assert states["command", "broken"][0] == "broken" and "no such driver" in states["command", "broken"][1]


def test_check_exits_0_if_all_plugins_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTPU_PLUGINS", "ttpu-llama,ttpu-fake")
    plugins = json.loads(run("list-plugins", "--check", "--json").stdout)
    assert {plugin["state"] for plugin in plugins} == {"loaded", "disabled"}


def test_an_empty_environment_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "default_registry", lambda: Registry([]))
    shown = run("list-plugins").stderr
    assert "pip install ttpu-llama" in shown and 'pip install "ttpu-core[jax]"' in shown


def test_doctor_asks_each_backend_and_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTPU_DISABLE_PLUGINS", "ttpu-jax")
    report = json.loads(run("doctor", "--json").stdout)
    assert report["backends"]["fake"]["devices"] == ["fake:0"]
    assert "pip install libfake" in report["missing"].values()
    assert "excluded by TTPU_DISABLE_PLUGINS" in report["backends"]["jax"]["error"]
    assert report["families"]["ttpu-llama"] == ["llama", "llama4", "llama4_text"]
    shown = run("doctor").stdout
    assert "devices: fake:0" in shown and "pip install libfake" in shown and sys.executable in shown


def test_doctor_survives_a_backend_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import fake_backend

    def fails(self: Any) -> None:
        raise OSError("the device is on fire")

    monkeypatch.setenv("TTPU_DISABLE_PLUGINS", "ttpu-jax")
    monkeypatch.setattr(fake_backend.Backend, "doctor", fails)
    assert json.loads(run("doctor", "--json").stdout)["backends"]["fake"]["error"] == "OSError: the device is on fire"


# -- commands of other distributions -----------------------------------------------------------------------


def test_help_lists_added_commands_without_importing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delitem(sys.modules, "their_commands", raising=False)
    shown = run("--help").stdout
    assert "Added by their-commands 1.0" in shown
    [old] = [line for line in shown.splitlines() if "old-commands" in line]
    assert "incompatible" in old
    assert "their_commands" not in sys.modules


def test_an_added_command_runs_with_its_own_options_and_help() -> None:
    assert run("hello", "world", "--loud-voice").stdout == "HELLO world\n"
    assert run("hello", "world", "--loud_voice").stdout == "HELLO world\n"
    assert "Whom to greet." in run("hello", "--help").stdout


def test_a_broken_command_breaks_only_itself() -> None:
    assert "no such driver" in error("broken")
    assert "no such driver" in error("broken", "--help")
    assert "must be a function" in error("number")
    assert "ttpu-core<0.0.1" in error("old")
    assert run("hello", "you").stdout == "hello you\n"


def test_a_command_of_a_backend_that_is_not_installed_says_which_install_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry_module, "default_registry", lambda: Registry([]))
    assert 'pip install "ttpu-core[jax]"' in error("compile-report", "x", "--topology", "v5e:2x4")
    assert 'pip install "ttpu-core[jax]"' in error("compile_report", "--help")
    assert "`pip install ttpu-conformance`" in error("conformance", "llama")


def test_an_error_of_an_added_command_is_one_line_as_it_was_written() -> None:
    assert error("refuse") == "no [bold]such luck[/bold]."


def test_a_built_in_command_cannot_be_taken_over(checkpoint: Path) -> None:
    assert run("info", checkpoint).stdout.startswith("model")


# -- info --------------------------------------------------------------------------------------------------

LLAMA_3_1_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def config_file(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**tiny.CONFIG, **changes}))
    return path


def test_info_explains_a_model_from_its_config_alone(tmp_path: Path) -> None:
    shown = run("info", config_file(tmp_path, **LLAMA_3_1_8B), "--backend", "fake").stdout
    assert (
        "32 layers: grouped-query attention, 32 query / 8 key-value heads of 128, rope llama3 θ=500000 ×8 (from 8,192 "
        "tokens), RMSNorm ε=1e-05 before each sub-layer, gated SiLU MLP 14,336\n"
    ) in shown
    assert "untied head" in shown
    assert "attention: fake_kernel: it is a test" in shown
    assert "no weights here" in shown
    assert run("info", tmp_path, "--backend", "fake").stdout.splitlines()[1:] == shown.splitlines()[1:]


def test_info_counts_parameters_and_memory(tmp_path: Path) -> None:
    facts = json.loads(run("info", config_file(tmp_path, **LLAMA_3_1_8B), "--backend", "fake", "--json").stdout)
    # Llama-3.1-8B has 8,030,261,248 parameters on its model card; per layer by hand:
    layer = 4096 * (32 + 2 * 8) * 128 + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
    assert facts["parameters"] == {
        "total": 8_030_261_248,
        "active": 8_030_261_248,
        "embedding": 128256 * 4096,
        "head": 128256 * 4096,
        "shared": 0,
        "per_layer": [layer] * 32,
    }
    assert facts["weight_bytes"]["bfloat16"] == 2 * 8_030_261_248
    assert facts["weight_bytes"]["int4"] == 8_030_261_248 // 2
    assert facts["kv_cache"]["bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert facts["files"] is None
    assert facts["plugin"] == f"ttpu-llama {metadata.version('ttpu-llama')}"
    assert facts["kernels"] == {"backend": "fake", "operations": {"attention": "fake_kernel: it is a test"}}


def test_info_describes_the_files_of_a_checkpoint(checkpoint: Path) -> None:
    files = json.loads(run("info", checkpoint, "--backend", "fake", "--json").stdout)["files"]
    assert files["tensors"] == 2 * 9 + 3
    assert files["dtypes"] == {"F32": 21}
    assert files["bytes"] == sum(tensor.nbytes for tensor in tiny.tensors(tiny.CONFIG).values())
    assert "21 tensors (21 F32), 125.4 KiB in 1 file" in run("info", checkpoint, "--backend", "fake").stdout


def test_info_refuses_more_layers_than_a_checkpoint_has_tensors(checkpoint: Path) -> None:
    config_file(checkpoint, num_hidden_layers=5_000)
    assert "5,000 layers, but the checkpoint has 21 tensors" in error("info", checkpoint, "--backend", "fake")


def test_info_notes_config_keys_that_nobody_reads_and_that_may_matter(tmp_path: Path) -> None:
    path = config_file(tmp_path, quantization_config={"quant_method": "gptq"}, attention_sinks=4, attention_dropout=0.1)
    facts = json.loads(run("info", path, "--backend", "fake", "--json").stdout)
    assert facts["config_keys_ignored"] == ["attention_sinks"]
    assert facts["quantization"] == {"scheme": "gptq"}
    shown = run("info", path, "--backend", "fake").stdout
    assert "nothing reads 'attention_sinks'" in shown and "attention_dropout" not in shown


def test_parameters_are_listed_with_the_tensors_that_make_them(tmp_path: Path) -> None:
    config = config_file(tmp_path, num_hidden_layers=3)
    shown = run("parameters", config, "--json").stdout
    facts = json.loads(shown)
    by_path = {parameter["path"]: parameter for parameter in facts["parameters"]}
    down = by_path["layers.2.mlp.down.kernel"]
    assert down["made_of"] == "model.layers.2.mlp.down_proj.weight" and down["axes"] == ["embed", "mlp"]
    gate_up = by_path["layers.0.mlp.gate_up.kernel"]
    assert gate_up["made_of"] == "stack(model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight)"
    assert [tensor["name"] for tensor in gate_up["tensors"]] == gate_up["made_of"][6:-1].split(", ")
    assert facts["total"] == sum(prod(parameter["shape"]) for parameter in facts["parameters"])


def test_parameters_of_layers_alike_are_shown_once(tmp_path: Path) -> None:
    config = config_file(tmp_path, num_hidden_layers=3)
    shown = run("parameters", config).stdout
    assert "layers.0.attention.qkv.kernel" in shown and "layers.1." not in shown
    assert "layer 0 stands for layers 0, 1, 2" in shown
    assert "layers.2.attention.qkv.kernel" in run("parameters", config, "--all").stdout


def test_a_rule_is_written_as_it_was_made() -> None:
    fused = Tensor("qkv", (12, 4))
    rule = Concat((fused[:8].reshape(2, 4, 4), fused[8:].reshape(2, 2, 4).transpose(0, 1, 2)), axis=1)
    assert made_of(rule) == "concat(qkv[:8].reshape(2, 4, 4), qkv[8:].reshape(2, 2, 4).transpose(0, 1, 2), axis=1)"
    assert made_of(fused[0, 1:3]) == "qkv[0, 1:3]"
    many = Stack(tuple(Tensor(f"experts.{number}", (2,)) for number in range(6)))
    assert made_of(many) == "stack(experts.0, … 4 more …, experts.5)"


def test_info_needs_no_backend_and_says_which_install_brings_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [point for point in metadata.entry_points(group="ttpu.architectures") if point.name == "llama"]
    monkeypatch.setattr(registry_module, "default_registry", lambda: Registry(points))
    assert 'pip install "ttpu-core[jax]"' in run("info", config_file(tmp_path)).stdout


# -- generate ----------------------------------------------------------------------------------------------

GREEDY = {"do_sample": False}


def arguments_of(calls: list[Any]) -> dict[str, Any]:
    """What the last call passed to `stream` and is not None."""
    return {name: value for name, value in calls[-1][1].items() if value is not None}


def test_generate_prints_the_text_on_stdout_and_the_timings_on_stderr(checkpoint: Path) -> None:
    result = generated(checkpoint, "-p", "[red]hi[/red]")
    assert result.stdout == "0: [red]hi[/red]\n"
    assert result.stderr == (
        "prompt 10 tokens in 0.50 s (20.0 tokens/s), generated 3 tokens in 0.25 s (8.0 tokens/s), load 1.00 s, "
        "compile 2.00 s\n"
    )
    assert generated(checkpoint, "-p", "hi", "--quiet").stderr == ""


def test_generate_as_json_prints_one_object(checkpoint: Path) -> None:
    result = generated(checkpoint, "-p", "hi", "--json", "--logprobs", "2")
    answer = json.loads(result.stdout)
    assert answer["text"] == "0: hi"
    assert answer["token_ids"] == [5, 6, 7]
    assert answer["finish_reason"] == "stop"
    assert answer["logprobs"][0] == {
        "token_id": 5,
        "logprob": -0.5,
        "top": [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -1.5}],
    }
    assert answer["timings"]["decode_tokens_per_second"] == 8.0
    assert result.stderr == ""
    assert "logprobs" not in json.loads(generated(checkpoint, "-p", "hi", "--json").stdout)


def test_logprobs_without_json_are_a_table_on_stderr(checkpoint: Path) -> None:
    result = generated(checkpoint, "-p", "hi", "--logprobs", "1")
    assert result.stdout == "0: hi\n"
    assert "5 '<5>'" in result.stderr and "-0.500" in result.stderr


def test_the_prompt_comes_from_one_place(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("two\nlines\n")
    assert generated(checkpoint, "--prompt-file", str(file)).stdout == "0: two\nlines\n"
    assert generated(checkpoint, "--prompt-file", "-", stdin="piped\n").stdout == "0: piped\n"
    assert generated(checkpoint, stdin="piped\n").stdout == "0: piped\n"
    base = ("generate", checkpoint, "--backend", "fake")
    assert "both given" in error(*base, "-p", "hi", "--prompt-file", file)
    assert "pass --prompt TEXT" in error(*base, stdin="")
    assert "cannot be read" in error(*base, "--prompt-file", tmp_path / "none.txt")
    file.write_bytes(b"\xff")
    assert "not UTF-8" in error(*base, "--prompt-file", file)


def test_every_option_reaches_the_model(checkpoint: Path, calls: list[Any]) -> None:
    import fake_backend

    options = (
        "--max-new-tokens 9 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 "
        "--presence-penalty 0.2 --frequency-penalty 0.3 --seed 7 --stop END --stop FIN --dtype bfloat16 "
        "--mesh tensor=2 --attn-implementation splash_attention"
    )
    generated(checkpoint, "-p", "hi", *options.split())
    assert calls[-1][0] == "hi"
    assert arguments_of(calls) == {
        "max_new_tokens": 9,
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 7,
        "stop_strings": ["END", "FIN"],
    }
    assert fake_backend.LOADS == [
        {"dtype": "bfloat16", "parallelism_strategy": "tensor=2", "attn_implementation": "splash_attention"}
    ]


def test_underscore_spellings_and_weights_dir_are_accepted(checkpoint: Path, calls: list[Any]) -> None:
    options = ("--backend", "fake", "--prompt", "hi", "--temperature", "1", "--top_p", "0.5")
    run("generate", "--weights_dir", checkpoint, "--max_length", "40", *options)
    assert arguments_of(calls) == {"max_length": 40, "do_sample": True, "temperature": 1.0, "top_p": 0.5}
    run("generate", checkpoint, "--max_new_tokens", "3", "--deterministic", "--backend", "fake", "-p", "hi")
    assert arguments_of(calls) == {"max_new_tokens": 3} | GREEDY


@pytest.mark.parametrize(
    ("generation_config", "options", "samples"),
    [
        ({}, "", False),
        ({"temperature": 0.6}, "", False),
        ({"do_sample": True}, "", True),
        ({"do_sample": True}, "--temperature 0", False),
        ({"do_sample": True}, "--deterministic", False),
        ({}, "--temperature 0.1", True),
        ({}, "--top-p 0.9", True),
        ({}, "--top-p 0.9 --temperature 0", False),
        ({}, "--seed 1", False),
        ({}, "--top-k 0 --top-p 1 --min-p 0", False),
        ({}, "--top-k 0 --min-p 0.1", True),
    ],
)
def test_the_command_line_then_the_checkpoint_decides_whether_to_sample(
    generation_config: dict[str, Any], options: str, samples: bool, checkpoint: Path, calls: list[Any]
) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps(generation_config))
    generated(checkpoint, "-p", "hi", *options.split())
    assert arguments_of(calls)["do_sample"] is samples


def test_chat_sends_the_prompt_as_a_users_turn(checkpoint: Path, calls: list[Any]) -> None:
    generated(checkpoint, "-p", "hi", "--chat")
    assert calls[-1][0] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "option",
    ["--temperature=nan", "--temperature=inf", "--temperature=-1", "--top-p=nan", "--top-p=0", "--top-p=1.5",
     "--min-p=nan", "--min-p=-0.1", "--top-k=-1", "--repetition-penalty=nan", "--repetition-penalty=0",
     "--presence-penalty=inf", "--frequency-penalty=nan", "--seed=-1", "--max-new-tokens=0", "--max-length=0"],
)  # fmt: skip
def test_a_number_out_of_range_is_refused_in_one_sentence_before_loading(
    option: str, checkpoint: Path, calls: list[Any]
) -> None:
    import fake_backend

    name, value = option.split("=")
    message = error("generate", checkpoint, "--backend", "fake", "-p", "hi", option)
    assert name in message and value in message and "is needed" in message
    assert fake_backend.LOADS == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--deterministic --temperature 0.5", "leave one of them out"),
        ("--max-length 9 --max-new-tokens 3", "pass one of them"),
        ("--weights-dir elsewhere", "both"),
        ("--stop=", "empty"),
    ],
)
def test_options_that_contradict_each_other_are_refused_before_loading(
    options: str, reason: str, checkpoint: Path, calls: list[Any]
) -> None:
    import fake_backend

    assert reason in error("generate", checkpoint, "--backend", "fake", "-p", "hi", *options.split())
    assert fake_backend.LOADS == []


def test_a_request_that_the_model_refuses_exits_2(checkpoint: Path) -> None:
    base = ("generate", checkpoint, "--backend", "fake", "-p", "too long")
    assert error(*base) == "the prompt is too long: shorten it."
    assert error(*base, "--json") == "the prompt is too long: shorten it."


def test_progress_is_shown_only_in_a_terminal_and_gone_before_the_text(checkpoint: Path) -> None:
    arguments = ("generate", checkpoint, "--backend", "fake", "-p", "slowly", "--dtype", "slow")
    terminal = Terminal(*arguments)
    shown = terminal.read_until("load 1.00 s")
    assert terminal.wait() == 0
    bars, _, text = shown.partition("0: slowly")
    assert "loading weights" in bars and "50.0 MiB of 100.0 MiB" in bars and "compiling" in bars
    assert "loading" not in text and "compiling" not in text
    finished = process(*arguments)
    assert (finished.stdout, finished.stderr.count("\n"), "loading" in finished.stderr) == ("0: slowly\n", 1, False)


def test_progress_after_it_was_closed_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeTerminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stderr = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    with LoadProgress() as progress:
        progress("compile", 0.0, 1.0)
        assert "compiling" in stderr.getvalue()
        progress.close()
        before = stderr.getvalue()
        progress("compile", 0.0, 1.0)
        assert stderr.getvalue() == before


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 bytes"), (1023, "1,023 bytes"), (1536, "1.5 KiB"), (2**40 * 3000, "3,000.0 TiB")]
)
def test_sizes_are_in_binary_units(number: int, words: str) -> None:
    assert in_bytes(number) == words


# -- chat --------------------------------------------------------------------------------------------------


def test_each_line_of_a_pipe_is_a_turn_of_one_conversation(checkpoint: Path, calls: list[Any]) -> None:
    chat = ("chat", checkpoint, "--backend", "fake", "--system", "Be brief.")
    result = run(*chat, stdin="one\n\ntwo\n/reset\n/etc/hosts is?\n/exit\nnever\n")
    assert result.stdout == "2: one\n4: two\n2: /etc/hosts is?\n"
    assert calls[1][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "2: one"},
        {"role": "user", "content": "two"},
    ]


def test_chat_explains_its_commands(checkpoint: Path) -> None:
    shown = run("chat", checkpoint, "--backend", "fake", stdin="/help\n/nonsense\n")
    assert shown.stdout == ""
    assert shown.stderr.count("/reset forgets") == 2 and "there is no command /nonsense" in shown.stderr


def test_a_reply_ends_by_1024_tokens_unless_somebody_says_otherwise(checkpoint: Path, calls: list[Any]) -> None:
    chat = ("chat", checkpoint, "--backend", "fake")
    run(*chat, stdin="hi\n")
    assert arguments_of(calls) == {"max_length": 10 + 1024} | GREEDY
    run(*chat, "--max-new-tokens", "5", stdin="hi\n")
    assert arguments_of(calls) == {"max_new_tokens": 5} | GREEDY
    (checkpoint / "generation_config.json").write_text('{"max_new_tokens": 64}')
    run(*chat, stdin="hi\n")
    assert arguments_of(calls) == GREEDY


def test_a_checkpoint_without_a_chat_template_is_told_to_use_generate(tmp_path: Path, calls: list[Any]) -> None:
    import fake_backend

    path = tiny.llama_checkpoint(tmp_path / "base")
    refusal = error("chat", path, "--backend", "fake", stdin="hi\n")
    assert "chat template" in refusal and f"ttpu generate {path}" in refusal
    assert "chat template" in error("generate", path, "--backend", "fake", "--chat", "-p", "hi")
    assert fake_backend.LOADS == []


def test_a_template_in_the_tokenizer_config_counts(tmp_path: Path) -> None:
    path = tiny.llama_checkpoint(tmp_path / "model")
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert run("chat", path, "--backend", "fake", stdin="hi\n").stdout == "1: hi\n"


def test_a_template_that_refuses_the_conversation_is_quoted(checkpoint: Path) -> None:
    run_chat = ("chat", checkpoint, "--backend", "fake", "--system", "forbidden")
    shown = run(*run_chat, stdin="hi\n", status=2)
    assert "System role not supported" in shown.stderr and "Traceback" not in shown.stderr


def test_in_a_terminal_ctrl_c_stops_the_reply_and_an_error_spares_the_conversation(checkpoint: Path) -> None:
    terminal = Terminal("chat", checkpoint, "--backend", "fake")
    terminal.read_until("> ")
    terminal.write("forever\n")
    terminal.read_until("on and on and ")
    terminal.write("\x03")  # Ctrl-C
    terminal.read_until("> ")
    terminal.write("too long\n")
    assert "error: the prompt is too long: shorten it." in terminal.read_until("> ")
    terminal.write("hi\n")
    # Three turns are left: the first prompt, what was said before Ctrl-C, and this one. The next prompt is awaited,
    # because a Ctrl-D typed before the line editor is there would be lost.
    assert "3: hi" in terminal.read_until("> ")
    terminal.write("\x04")  # Ctrl-D
    assert terminal.wait() == 0


class Terminal:
    """A command whose stdin, stdout and stderr are one terminal, which controls it."""

    def __init__(self, *arguments: str | Path) -> None:
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "INPUTRC": "/dev/null"}
            os.execve(sys.executable, command(*arguments), environment)

    def write(self, text: str) -> None:
        """Type."""
        os.write(self._terminal, text.encode())

    def read_until(self, text: str, seconds: float = 60.0) -> str:
        """What is shown from now on, up to `text`."""
        shown, end = b"", time.monotonic() + seconds
        while text.encode() not in shown:
            ready, _, _ = select.select([self._terminal], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{text!r} did not come; what came is {shown!r}"
            try:
                part = os.read(self._terminal, 4096)
            except OSError:  # Linux, when the other side is closed
                part = b""
            assert part, f"it ended before {text!r}; what came is {shown!r}"
            shown += part
        return shown.decode()

    def wait(self, seconds: float = 60.0) -> int:
        """The exit status; what is still shown is read, or the command could not end. Killed if nothing comes."""
        while select.select([self._terminal], [], [], seconds)[0]:
            try:
                if not os.read(self._terminal, 4096):
                    break
            except OSError:  # Linux, when the other side is closed
                break
        else:
            os.kill(self._pid, signal.SIGKILL)
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


# -- from Python -------------------------------------------------------------------------------------------


def test_auto_model_passes_dtype_and_options_to_the_backend(checkpoint: Path, calls: list[Any]) -> None:
    import fake_backend

    model = AutoModelForTPU.from_pretrained(checkpoint, backend="fake", dtype="float32", mesh="tensor=2")
    assert isinstance(model, fake_backend.Model)
    assert fake_backend.LOADS == [{"dtype": "float32", "mesh": "tensor=2"}]
    with pytest.raises(TypeError, match="from_pretrained"):
        AutoModelForTPU()


def test_the_ttpu_module_has_exactly_its_public_names() -> None:
    assert ttpu.AutoModelForTPU is AutoModelForTPU
    names = ["LLM", "AsyncEngine", "AutoModelForTPU", "AutoXLAModelForCausalLM", "BeamSearchParams", "EngineArgs"]
    names += ["GuidedDecoding", "LoRARequest", "PromptsFailedError", "SamplingParams", "StructuredOutputsParams"]
    names += ["Trainer", "TrainerCallback", "TrainingArguments", "initialize"]
    assert ttpu.__all__ == names
    assert [name for name in dir(ttpu) if not name.startswith("__")] == sorted(names)
    with pytest.raises(AttributeError, match=r"no attribute 'Trainr'; it has AsyncEngine, AutoModelForTPU"):
        _ = ttpu.Trainr


def test_a_name_of_a_backend_that_is_missing_says_what_brings_it() -> None:
    code = (
        "import sys; sys.modules['ttpu_torch_xla'] = None\n"
        "try:\n    from ttpu import AutoXLAModelForCausalLM\nexcept ImportError as error:\n    print(error)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 'pip install "ttpu-core[torch-xla]"' in printed


def test_importing_ttpu_imports_nothing_else() -> None:
    code = "import sys, ttpu; print([name for name in sys.modules if name.startswith(('ttpu_core', 'jax'))])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- with a real backend -----------------------------------------------------------------------------------


@pytest.fixture
def jax_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips where ttpu-jax is not installed."""
    pytest.importorskip("ttpu_jax")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def test_jax_generates_the_same_text_streamed_and_as_json(checkpoint: Path, jax_backend: None) -> None:
    arguments = ("generate", checkpoint, "-p", "hello", "--max-new-tokens", "5")
    answer = json.loads(run(*arguments, "--json", "--logprobs", "1").stdout)
    assert len(answer["token_ids"]) == 5 and answer["finish_reason"] == "length"
    assert answer["timings"]["prefill_tokens"] == len("hello")
    # Greedy: each token is the likeliest one.
    assert all(entry["token_id"] == entry["top"][0]["token_id"] for entry in answer["logprobs"])
    streamed = run(*arguments)
    assert streamed.stdout == answer["text"] + "\n" * (not answer["text"].endswith("\n"))
    assert "prompt 5 tokens in" in streamed.stderr and "generated 5 tokens in" in streamed.stderr


def test_jax_chats_until_the_context_is_full_and_can_start_again(checkpoint: Path, jax_backend: None) -> None:
    finished = run("chat", checkpoint, "--deterministic", stdin="hi\n/reset\nhi\n")
    middle = len(finished.stdout) // 2
    assert len(finished.stdout) > 100 and finished.stdout[:middle] == finished.stdout[middle:]
    assert finished.stderr == ""
    full = run("chat", checkpoint, "--deterministic", stdin="hi\nand?\n", status=2)
    assert "context holds 256" in one_sentence(full.stderr)


def test_the_default_device_of_torch_xla_is_left_out_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    leave_out_default_device()
    logging.warning("Defaulting to PJRT_DEVICE=CPU")
    logging.warning("Setting PJRT_DEVICE=TPU")
    assert caplog.messages == ["Setting PJRT_DEVICE=TPU"]


def test_jax_refuses_damaged_weights_and_unknown_options_with_one_sentence(tmp_path: Path, jax_backend: None) -> None:
    assert "truncated" in error("generate", truncated(tmp_path), "-p", "hi")
    whole = tiny.llama_checkpoint(tmp_path / "whole")
    assert "tensor" in error("generate", whole, "-p", "hi", "--mesh", "tensr=2")
    with pytest.raises((RequestError, UnsupportedError), match="colour"):
        AutoModelForTPU.from_pretrained(whole, colour="blue")


def test_doctor_and_info_know_the_jax_backend(checkpoint: Path, jax_backend: None) -> None:
    report = json.loads(run("doctor", "--json").stdout)["backends"]["jax"]
    assert report["versions"]["jax"] == metadata.version("jax") and report["devices"]
    assert "attention" in " ".join(json.loads(run("info", checkpoint, "--json").stdout)["kernels"]["operations"])
