"""What tutorial and walkthrough show is so: blocks that run print what stands below them, blocks that name a file are
part of it, and files that are pointed at exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from safetensors.numpy import save_file
from throwaway import Distribution, Environment

from ttpu_core import ModelConfig, default_registry
from ttpu_core.mapping import gather

ROOT = Path(__file__).parent.parent
TUTORIAL, WALKTHROUGH = ROOT / "docs/write-a-plugin.md", ROOT / "docs/walkthrough.md"
RUN = """
import contextlib, io, json, sys
values, shown = {"__name__": "walkthrough"}, []
for block in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(block, "walkthrough", "exec"), values)
    shown.append(out.getvalue())
print(json.dumps(shown))
"""


def marked_blocks(marker: str) -> list[str]:
    """The tutorial's code blocks below a comment."""
    return re.findall(rf"<!-- {marker} -->\n```\w+\n(.*?)```", TUTORIAL.read_text(), flags=re.S)


def block(marker: str) -> str:
    (found,) = marked_blocks(re.escape(marker))
    return str(found)


@pytest.mark.slow
def test_the_walkthrough_prints_what_it_shows() -> None:
    blocks = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", WALKTHROUGH.read_text(), flags=re.S)
    assert len(blocks) == WALKTHROUGH.read_text().count("```python") >= 10
    finished = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps([code for code, _ in blocks]),
        env={**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    for (code, expected), shown in zip(blocks, json.loads(finished.stdout), strict=True):
        assert shown == expected, code


def test_the_tutorials_snippets_are_parts_of_the_example() -> None:
    marked = re.findall(r"<!-- (examples/\S+) -->\n```\w+\n(.*?)```", TUTORIAL.read_text(), flags=re.S)
    assert {Path(path).name for path, _ in marked} == {"olmo2.py", "olmo3.py", "conformance.toml"}
    for path, snippet in marked:
        assert snippet in (ROOT / path).read_text(), snippet


def test_every_hook_of_the_example_is_in_the_tutorial() -> None:
    for module in ("olmo2", "olmo3"):
        source = (ROOT / f"examples/ttpu-olmo/ttpu_olmo/{module}.py").read_text()
        shown = "".join(marked_blocks(rf"examples/ttpu-olmo/ttpu_olmo/{module}\.py"))
        hooks = re.findall(r"^def ttpu_\w+", source, flags=re.M)
        assert hooks and [hook for hook in hooks if hook not in shown] == []


def test_the_line_counts_in_the_tutorial_are_those_of_the_example() -> None:
    folder = ROOT / "examples/ttpu-olmo/ttpu_olmo"
    olmo2, olmo3 = (len((folder / f"{module}.py").read_text().splitlines()) for module in ("olmo2", "olmo3"))
    assert f"OLMo 2 is done: {olmo2} lines." in TUTORIAL.read_text()
    assert f"That makes {olmo3} lines more." in TUTORIAL.read_text()


@pytest.mark.parametrize("document", [TUTORIAL, WALKTHROUGH], ids=lambda path: path.stem)
def test_files_that_are_pointed_at_exist(document: Path) -> None:
    text = document.read_text()
    links = [document.parent / target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    pointers = [ROOT / name for name in re.findall(r"`((?:ttpu_core|plugins|examples|docs)/[\w./-]+)`", text)]
    assert len(links) > 2
    assert [str(path) for path in (*links, *pointers) if not path.exists()] == []


def test_the_mapping_snippet_puts_fused_projections_where_they_belong() -> None:
    module: dict[str, Any] = {"__name__": "mapping"}
    exec(compile(block("mapping"), "mapping", "exec"), module)
    spec = default_registry().architecture(ModelConfig.from_dict(tiny.CONFIG)).spec
    mapping = module["ttpu_flax_mapping"](spec)
    mapping.check_parameters(spec.parameters)
    hidden, inner, dim = tiny.CONFIG["hidden_size"], tiny.CONFIG["intermediate_size"], 8
    random = np.random.default_rng(0)
    parts = [random.standard_normal((rows * dim, hidden)) for rows in (4, 2, 2)]
    gate, up = random.standard_normal((2, inner, hidden))
    tensors = {"qkv_proj": np.concatenate(parts), "gate_up_proj": np.concatenate([gate, up])}
    read = {
        path: np.empty(spec.parameters[path].shape)
        for path in ("layers.0.attention.qkv.kernel", "layers.0.mlp.gate_up.kernel")
    }
    for path, out in read.items():
        gather(mapping[path], lambda name: tensors[name.split(".")[-2]], out)
    query, key, value = parts
    fused = read["layers.0.attention.qkv.kernel"]
    for group in range(2):
        np.testing.assert_array_equal(fused[group, :2].reshape(2 * dim, hidden), query[group * 2 * dim :][: 2 * dim])
        np.testing.assert_array_equal(fused[group, 2], key[group * dim :][:dim])
        np.testing.assert_array_equal(fused[group, 3], value[group * dim :][:dim])
    np.testing.assert_array_equal(read["layers.0.mlp.gate_up.kernel"], [gate, up])


def test_the_mixer_snippets_make_a_model_that_caches_and_pads(tmp_path: Path) -> None:
    files = {
        "ttpu_mean/__init__.py": "",
        "ttpu_mean/mean.py": block("mixer: hooks"),
        "ttpu_mean/jax/__init__.py": "",
        "ttpu_mean/jax/decaying_mean.py": block("mixer: implementation"),
    }
    family = Distribution("ttpu-mean", files, {"ttpu.architectures": {"mean": "ttpu_mean.mean"}})
    environment = Environment.install(tmp_path, family)
    config = {**tiny.CONFIG, "model_type": "mean", "mean_size": 24}
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(config))
    random, weights = np.random.default_rng(0), tiny.tensors(config)
    weights = {name: array for name, array in weights.items() if "self_attn" not in name}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {"value.weight": (24, 32), "decay": (24,), "output.weight": (32, 24)}.items():
            weights[f"model.layers.{layer}.mean.{name}"] = random.standard_normal(shape).astype(np.float32)
    save_file(weights, checkpoint / "model.safetensors")
    code = textwrap.dedent(
        f"""
        import numpy as np
        from ttpu import AutoModelForTPU

        model = AutoModelForTPU.from_pretrained({str(checkpoint)!r})
        prompts = np.random.default_rng(1).integers(0, 250, (2, 9))
        mask = np.ones_like(prompts)
        mask[1, :4] = 0
        together = model.generate(prompts, attention_mask=mask, max_new_tokens=6, ignore_eos=True)
        rows = [prompts[0].tolist(), prompts[1, 4:].tolist()]
        for row in rows:
            for _ in range(6):
                row.append(int(np.argmax(model([row]).logits[0, -1])))
        report([together[:, 9:].tolist(), [row[-6:] for row in rows]])
        """
    )
    cached, uncached = environment.run(code, JAX_PLATFORMS="cpu")
    assert cached == uncached
    assert len({tuple(row) for row in cached}) == 2
