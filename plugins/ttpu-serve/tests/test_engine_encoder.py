"""Text encoders are served for embeddings: each text gets what transformers computes for it alone, whatever runs beside
it; what needs a decoder is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("ttpu_any")

from serving import Running, running  # noqa: E402

from ttpu import LLM, AutoModelForTPU, SamplingParams  # noqa: E402
from ttpu_core.cli.main import main  # noqa: E402
from ttpu_core.errors import RequestError, UnsupportedError  # noqa: E402
from ttpu_serve.api.open_engine import open_engine, read_options  # noqa: E402

pytestmark = pytest.mark.torch

VOCAB, CONTEXT = 61, 64
TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = {"num_hidden_layers": 3, "global_attn_every_n_layers": 3, "local_attention": 8, "max_position_embeddings": 64}
MODERN = WINDOWS | {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
LENGTHS = (5, 1, 17, 40, 9, 33, 64, 16)
OPTIONS: dict[str, Any] = {"backend": "jax", "dtype": "float32", "progress": None}


def make(folder: Path, model_type: str, head: str = "AutoModelForMaskedLM", **keys: Any) -> Path:
    torch.manual_seed(0)
    model = getattr(transformers, head).from_config(transformers.CONFIG_MAPPING[model_type](**TINY | keys))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.eval().save_pretrained(folder)
    return folder


def texts(most: int = CONTEXT) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, VOCAB, min(length, most)).tolist() for length in LENGTHS]


def expected(folder: Path, pooling: str, most: int = CONTEXT) -> np.ndarray:
    """Embeddings [texts, hidden], each of one text alone."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    rows = []
    for text in texts(most):
        with torch.no_grad():
            states = model(input_ids=torch.tensor([text])).last_hidden_state[0].numpy()
        vector = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling]
        rows.append(vector / np.linalg.norm(vector))
    return np.stack(rows)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("encoder") / "bert", "bert")


@pytest.fixture(scope="module")
def llm(bert: Path) -> Any:
    return LLM(str(bert), max_num_seqs=4, **OPTIONS)


@pytest.mark.parametrize("pooling", ["auto", "mean", "cls", "last"])
def test_embeddings_are_those_of_each_text_alone(bert: Path, llm: Any, pooling: Any) -> None:
    """Where nothing is declared, the mean of all states, as in sentence-transformers."""
    found = np.stack([each.embedding for each in llm.embed(texts(), pooling=pooling)])
    np.testing.assert_allclose(found, expected(bert, "mean" if pooling == "auto" else pooling), atol=1e-5)
    assert llm.engine.stats().recompiles == 0


@pytest.mark.parametrize(
    ("model_type", "keys", "most"),
    [
        ("xlm-roberta", {"pad_token_id": 1, "max_position_embeddings": 66}, 64),
        ("modernbert", MODERN, 64),
        ("nomic_bert", {}, 64),
    ],
    ids=["positions that begin behind padding's", "windows", "rope"],
)
def test_other_encoders_and_a_mesh(model_type: str, keys: dict[str, Any], most: int, tmp_path: Path) -> None:
    folder = make(tmp_path, model_type, **keys)
    engine = LLM(str(folder), max_num_seqs=4, token_buckets=[32], mesh="data=2,tensor=2", **OPTIONS)
    found = np.stack([each.embedding for each in engine.embed(texts(most))])
    np.testing.assert_allclose(found, expected(folder, "mean", most), atol=1e-5)
    with pytest.raises(RequestError, match=f"the prompt has {most + 1} tokens, but this engine's sequences have at"):
        engine.embed([[3] * (most + 1)])


def test_a_called_encoder_gives_hidden_states_and_ignores_padding(bert: Path) -> None:
    model = AutoModelForTPU.from_pretrained(bert, backend="jax", dtype="float32")
    ids = np.array([texts()[0] + [0] * 4, texts()[4]])
    mask = np.array([[1] * 5 + [0] * 4, [1] * 9])
    host = transformers.AutoModel.from_pretrained(bert).eval()
    found = np.asarray(model(input_ids=ids, attention_mask=mask).last_hidden_state)
    for row, length in enumerate((5, 9)):
        with torch.no_grad():
            states = host(input_ids=torch.tensor(ids[row : row + 1, :length])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(found[row, :length], states, atol=1e-5)
    listed = np.asarray(model([texts()[0], texts()[4]]).last_hidden_state)
    np.testing.assert_allclose(listed[0, :5], found[0, :5], atol=1e-6)
    with pytest.raises(RequestError, match=r"bert was to generate text, but it is an encoder.* LLM\(\.\.\.\)\.embed"):
        model.generate(ids)
    with pytest.raises(RequestError, match="a text has 65 tokens, but this model reads at most 64"):
        model([[3] * 65])
    with pytest.raises(RequestError, match="bert was to give logits, but it is a text encoder"):
        _ = model.spec


def test_what_needs_a_decoder_is_refused(bert: Path, llm: Any) -> None:
    with pytest.raises(RequestError, match="this model is a text encoder, which gives embeddings alone"):
        llm.generate([{"prompt_token_ids": [3]}], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="speculative='ngram' was given, but no plugin describes"):
        LLM(str(bert), speculative="ngram", **OPTIONS)


def test_weights_sleep(bert: Path, llm: Any) -> None:
    llm.sleep()
    llm.wake_up()
    np.testing.assert_allclose(llm.embed([texts()[3]])[0].embedding, expected(bert, "mean")[3], atol=1e-5)


def test_an_encoder_that_padding_changes_is_refused(tmp_path: Path) -> None:
    """Its convolutions read the tokens behind the text."""
    make(tmp_path, "convbert", embedding_size=32)
    with pytest.raises(UnsupportedError, match=r"states of a text that is padded are .* its embeddings would be wrong"):
        LLM(str(tmp_path), **OPTIONS)


@pytest.fixture(scope="module")
def served(bert: Path) -> Iterator[Running]:
    pytest.importorskip("openai")
    load, config = read_options(str(bert), {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 33}, "jax")
    with running(open_engine(str(bert), load, config, backend="jax", progress=None)) as server:
        yield server


def test_a_real_client_gets_embeddings(bert: Path, served: Running) -> None:
    import openai

    client = served.client()
    name = client.models.list().data[0].id
    chosen = [0, 1, 2, 4, 5]  # the last one fills the context
    answer = client.embeddings.create(model=name, input=[texts()[index] for index in chosen])
    found = np.array([each.embedding for each in answer.data])
    np.testing.assert_allclose(found, expected(bert, "mean")[chosen], atol=1e-5)
    assert answer.usage.prompt_tokens == sum(LENGTHS[index] for index in chosen)
    with pytest.raises(openai.BadRequestError, match="this model is a text encoder"):
        client.completions.create(model=name, prompt=[3, 4], max_tokens=2)
    with pytest.raises(openai.BadRequestError, match="input has 40 tokens, but this server reads at most 33"):
        client.embeddings.create(model=name, input=[texts()[3]])


def test_what_sentence_transformers_declared_is_pooled(bert: Path, tmp_path: Path) -> None:
    folder = make(tmp_path / "cls", "bert", "AutoModel")
    modules = [{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    engine = LLM(str(folder), max_model_len=64, max_num_seqs=1, token_buckets=[64], **OPTIONS)
    found = np.stack([each.embedding for each in engine.embed(texts()[:2])])
    np.testing.assert_allclose(found, expected(folder, "cls")[:2], atol=1e-5)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["generate", "-p", "tide"], "bert was to generate text, but it is an encoder"),
        (["plan"], "a plan for a model of type 'bert' was asked for, but it is a text encoder, which keeps no cache"),
    ],
    ids=["generate", "plan"],
)
def test_commands_for_decoders_end_with_one_error(
    command: list[str], said: str, bert: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ttpu", command[0], str(bert), *command[1:]])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_info_says_where_an_encoder_runs(
    bert: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ttpu", "info", str(bert), "--backend", "jax", "--json"])
    with pytest.raises(SystemExit):
        main()
    found = json.loads(capsys.readouterr().out)
    assert found["code"].endswith("BertModel") and "/v1/embeddings" in found["runs_in"]
    assert "begin_a_plugin" not in found
