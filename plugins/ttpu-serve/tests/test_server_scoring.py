"""/score, /rerank, /pooling and what else vLLM's clients ask about embeddings, over a socket; the core's embedding of a
text is that of its length and its bytes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_core import FakeCore, tokenizer
from serving import Running, running
from tokenizers.processors import TemplateProcessing

from ttpu_core.errors import RequestError
from ttpu_serve.pair_scores import paired, ranked
from ttpu_serve.server import ServerSettings


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    core = FakeCore(tokenizer(tmp_path_factory.mktemp("tokenizer")), max_model_len=64, embeds=True)
    with running(core, ServerSettings(model_names=("main",), api_keys=("secret",))) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http(headers={"Authorization": "Bearer secret"}) as http:
        yield http


def vector(text: str) -> np.ndarray:
    """What the core makes of a text."""
    found = np.array([len(text), sum(text.encode()), 1.0])
    return found / np.linalg.norm(found)


def got(answer: httpx.Response, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a", "bcd", [("a", "bcd")]),
        ("a", ["bcd", "z" * 9], [("a", "bcd"), ("a", "z" * 9)]),
        (["a", "b"], ["cc", "dd"], [("a", "cc"), ("b", "dd")]),
    ],
)
def test_scores_are_cosines(http: httpx.Client, path: str, first: Any, second: Any, pairs: Any) -> None:
    told = got(http.post(path, json={"model": "main", "text_1": first, "text_2": second}))
    assert [one["score"] for one in told["data"]] == pytest.approx([vector(a) @ vector(b) for a, b in pairs], abs=1e-6)
    assert [one["index"] for one in told["data"]] == list(range(len(pairs)))
    assert told["usage"]["prompt_tokens"] == len("".join([*first, *second]))


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(http: httpx.Client, path: str) -> None:
    documents = ["\x01\x01", "zzzz", "aaa", "a"]
    told = got(http.post(path, json={"model": "main", "query": "aa", "documents": documents, "top_n": 3}))
    scores = [float(vector("aa") @ vector(text)) for text in documents]
    order = sorted(range(4), key=lambda place: -scores[place])[:3]
    assert [one["index"] for one in told["results"]] == order
    assert [one["relevance_score"] for one in told["results"]] == pytest.approx([scores[i] for i in order], abs=1e-6)
    assert [one["document"]["text"] for one in told["results"]] == [documents[i] for i in order]


def test_documents_may_be_objects_and_need_not_come_back(http: httpx.Client) -> None:
    asked = {"query": "aa", "documents": [{"text": "a"}, "b"], "return_documents": False}
    told = got(http.post("/rerank", json=asked))
    assert told["model"] == "main" and all("document" not in one for one in told["results"])


def test_pooling_gives_embeddings(http: httpx.Client) -> None:
    told = got(http.post("/pooling", json={"model": "main", "input": ["abc", "d"]}))
    assert told["data"][0]["data"] == pytest.approx(vector("abc").tolist())
    packed = got(http.post("/pooling", json={"input": "abc", "encoding_format": "base64"}))["data"][0]["data"]
    assert np.frombuffer(base64.b64decode(packed), "<f4") == pytest.approx(vector("abc"))


@pytest.mark.parametrize(("cut", "read"), [(3, "xyz"), (-1, ("xyz" * 99)[:64]), (1000, None)])
def test_inputs_are_cut_where_it_is_asked_for(http: httpx.Client, cut: int, read: str | None) -> None:
    asked = {"model": "main", "input": "xyz" * 99, "truncate_prompt_tokens": cut}
    for path, name in (("/pooling", "data"), ("/v1/embeddings", "embedding")):
        answer = http.post(path, json=asked)
        if read is None:
            assert got(answer, 400)["error"]["param"] == "input"
        else:
            assert got(answer)["data"][0][name] == pytest.approx(vector(read).tolist())
    assert got(http.post("/pooling", json={"input": "xyz" * 99}), 400)["error"]["code"] == "context_length_exceeded"


def test_an_input_that_is_cut_keeps_the_special_tokens_around_it(tmp_path: Path) -> None:
    around = tokenizer(tmp_path)
    specials = [(around.convert_ids_to_tokens(256), 256), (around.convert_ids_to_tokens(258), 258)]
    around.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{specials[0][0]} $A {specials[1][0]}", special_tokens=specials
    )
    with running(FakeCore(around, max_model_len=64, embeds=True)) as server:
        for options, ids in (
            ({}, [256, 97, 98, 99, 258]),
            ({"add_special_tokens": False}, [97, 98, 99]),
            ({"truncate_prompt_tokens": 4}, [256, 97, 98, 258]),
            ({"truncate_prompt_tokens": 2, "add_special_tokens": False}, [97, 98]),
            ({"truncate_prompt_tokens": 2}, [256, 97]),
        ):
            found = np.array([len(ids), sum(ids), 1.0])
            told = got(server.http().post("/pooling", json={"input": "abc", **options}))
            assert told["data"][0]["data"] == pytest.approx((found / np.linalg.norm(found)).tolist()), options


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, None),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["x"] * 3000}, "text_2"),
        ("/rerank", {"query": "a", "documents": [{"image": "x"}]}, "documents[0]"),
        ("/rerank", {"query": "a", "documents": ["b" * 99]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "task"),
        ("/classify", {"input": "a"}, None),
    ],
)
def test_what_is_not_served_is_refused(http: httpx.Client, path: str, asked: Any, param: str | None) -> None:
    assert got(http.post(path, json={"model": "main", **asked}), 400)["error"]["param"] == param


def test_models_that_make_text_score_nothing_unless_asked(server: Running, http: httpx.Client) -> None:
    server.core.embeds = False
    try:
        for path, asked in (
            ("/score", {"text_1": "a", "text_2": "b"}),
            ("/rerank", {"query": "a", "documents": ["b"]}),
        ):
            assert "no embedding model" in got(http.post(path, json=asked), 400)["error"]["message"]
            got(http.post(path, json={**asked, "pooling": "mean"}))
    finally:
        server.core.embeds = True


def test_keys_are_asked_for_and_load_balancers_need_none(server: Running) -> None:
    with server.http() as stranger:
        assert got(stranger.post("/score", json={"text_1": "a", "text_2": "b"}), 401)
        assert got(stranger.get("/tokenizer_info"), 401)
        assert stranger.get("/ping").status_code == stranger.post("/ping").status_code == 200
        assert got(stranger.get("/load")) == {"server_load": 0}


def test_the_tokenizer_is_told(http: httpx.Client) -> None:
    answer = http.get("/tokenizer_info")
    told = got(answer)
    assert told["eos_token"] and "messages" in told["chat_template"] and told["vocab_size"] > 256
    assert "pytest" not in answer.text, "no paths of this machine"


def test_pairs_and_ranks() -> None:
    assert paired(1, 3) == [(0, 0), (0, 1), (0, 2)] and paired(2, 2) == [(0, 0), (1, 1)]
    for counts in ((2, 1), (2, 3), (0, 0), (1, 0)):
        with pytest.raises(RequestError):
            paired(*counts)
    assert ranked([0.1, 0.9, 0.9], None) == [1, 2, 0] and ranked([0.1, 0.9], 1) == [1] and ranked([0.1], 0) == [0]
