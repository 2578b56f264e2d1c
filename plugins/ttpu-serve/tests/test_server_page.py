"""The page at `/`, in a real browser: a chat that streams, stops and goes on, and metrics that live."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, browser, executable
from fake_core import FakeCore, tokenizer
from serving import Running, running

from ttpu_serve.server import ServerSettings

pytestmark = pytest.mark.skipif(executable() is None, reason="no Chromium is installed")

CODE = (
    "It is `short`:\n\n```python\nprint('<b>hello</b>')\n```\n\n"
    "That is **all**. <script>document.title = 'taken'</script>"
)
SAID = "document.querySelector('.turn.assistant:last-of-type .words')?.innerText"
DONE = "document.querySelector('.turn:last-child').dataset.reason"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    core = FakeCore(
        tokenizer(tmp_path_factory.mktemp("tokenizer")),
        max_model_len=4096,
        replies={"a program": CODE, "endless": "round and " * 300},
        adapters={"poet": 1},
    )
    with running(core, ServerSettings(model_names=("tiny-chat",), reasoning_parser="think")) as server:
        yield server


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(server: Running, tab: Page) -> Page:
    server.core.seconds = 0.0
    tab.open(server.url + "/")
    tab.wait("document.querySelector('#state').innerText === 'ready'")
    return tab


def send(page: Page, text: str) -> None:
    page.evaluate(f"document.querySelector('#prompt').value = {json.dumps(text)}")
    page.evaluate("document.querySelector('#send').click()")


def test_an_answer_streams_into_the_page_and_is_remembered(server: Running, page: Page) -> None:
    send(page, "say: good morning")
    page.wait(DONE)
    assert page.evaluate(SAID) == "good morning"
    assert "13 tokens" in page.evaluate("document.querySelector('.turn:last-child footer').innerText")
    send(page, "and so on")
    page.wait("document.querySelectorAll('.turn').length === 4 && " + DONE)
    roles = page.evaluate("messages.map((message) => message.role).join(' ')")
    assert roles == "user assistant user assistant", "the conversation is sent again with every turn"
    assert not page.problems


def test_reasoning_is_shown_apart_from_the_answer(page: Page) -> None:
    send(page, "say: <think>Hm.</think>Yes")
    page.wait(DONE)
    assert page.evaluate(SAID) == "Yes"
    assert page.evaluate("document.querySelector('.turn:last-child .thoughts pre').textContent") == "Hm."


def test_code_is_shown_as_code_and_nothing_in_an_answer_runs(page: Page) -> None:
    send(page, "write a program")
    page.wait(DONE)
    assert page.evaluate("document.querySelector('.turn pre code').innerText") == "print('<b>hello</b>')"
    assert page.evaluate("document.querySelector('.turn strong').innerText") == "all"
    assert "<script>" in page.evaluate(SAID)
    assert page.evaluate("document.title") == "tiny-chat · TTPU"


def test_the_stop_button_ends_the_answer_here_and_in_the_engine(server: Running, page: Page) -> None:
    server.core.seconds = 0.01
    send(page, "endless")
    page.wait(f"({SAID} || '').length > 5")
    assert page.evaluate("document.querySelector('#send').hidden")
    page.evaluate("document.querySelector('#stop').click()")
    assert page.wait(DONE) == "stopped"
    said = page.evaluate(SAID)
    assert said.startswith("round")
    deadline = time.monotonic() + 10
    while server.core.outputs and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server.core.outputs
    assert page.evaluate(SAID) == said


def test_a_new_chat_begins_while_the_last_is_still_answered(server: Running, page: Page) -> None:
    server.core.seconds = 0.01
    send(page, "endless")
    page.wait(f"({SAID} || '').length > 5")
    server.core.seconds = 0.0
    page.evaluate("document.querySelector('#new').click(); ask('say: fresh')")
    page.wait(f"document.querySelector('.turn') && {DONE}")
    assert page.evaluate(SAID) == "fresh"
    assert page.evaluate("messages.map((message) => message.content).join('|')") == "say: fresh|fresh"
    assert not page.evaluate("document.querySelector('#send').hidden")


def test_sampling_settings_are_sent_and_kept(server: Running, page: Page) -> None:
    fill = (
        "(name, text) => { const box = settings.elements[name]; box.value = text;"
        "box.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    for name, text in {"temperature": "0.5", "max_tokens": "4", "seed": "7", "stop": "zz", "top_k": "3"}.items():
        page.evaluate(f"({fill})({json.dumps(name)}, {json.dumps(text)})")
    send(page, "say: abcdefgh")
    assert page.wait(DONE) == "length"
    assert page.evaluate(SAID) == "abcd"
    params = server.core.seen[-1]
    assert (params.temperature, params.max_tokens, params.seed, params.stop, params.top_k) == (0.5, 4, 7, ("zz",), 3)
    page.open(server.url + "/?again")
    assert page.evaluate("settings.elements.temperature.value") == "0.5"
    page.evaluate("localStorage.clear()")


def test_refusals_are_shown_and_the_question_is_forgotten(page: Page) -> None:
    send(page, "x" * 5000)
    page.wait("document.querySelector('.turn.failed [role=alert]') !== null")
    assert "shorten it" in page.evaluate("document.querySelector('.turn.failed').innerText")
    assert page.evaluate("messages.length") == 0


def test_metrics_live(server: Running, page: Page, tmp_path: Path) -> None:
    before = page.evaluate("before.engine.requests")
    send(page, "say: hello")
    page.wait(f"before.engine.requests > {before}")
    assert page.wait("document.querySelector('#chart-running path.line').getAttribute('d').includes('L')")
    assert page.evaluate("document.querySelectorAll('.chart').length") >= 5
    assert "Prefix cache hits" in page.evaluate("document.querySelector('#facts').innerText")
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_adapters_can_be_chosen(page: Page) -> None:
    options = page.wait("[...document.querySelectorAll('#models option')].map((option) => option.value).join(' ')")
    assert options == "tiny-chat poet"


def test_a_link_can_ask(server: Running, page: Page) -> None:
    page.open(server.url + "/?prompt=say:%20linked&autosend=1")
    page.wait(f"document.querySelector('.turn') && {DONE}")
    assert page.evaluate(SAID) == "linked"


def test_a_link_neither_spends_a_kept_key_nor_sets_one(server: Running, page: Page) -> None:
    page.evaluate("sessionStorage.setItem('ttpu-key', 'mine')")
    everything = "&".join(f"{place}=x" for place in range(20))
    page.open(server.url + f"/?prompt=say:%20linked&autosend=1&length=1&key=theirs&{everything}")
    page.wait("document.querySelector('#state').innerText === 'ready' && document.querySelector('#prompt').value")
    assert page.evaluate("document.querySelectorAll('.turn').length") == 0
    assert page.evaluate("settings.elements.key.value") == "mine"
    assert not page.problems
    page.evaluate("sessionStorage.clear()")


def test_it_asks_for_the_key_where_one_is_needed(tmp_path: Path, tab: Page) -> None:
    settings = ServerSettings(api_keys=("secret",))
    with running(FakeCore(tokenizer(tmp_path)), settings) as server:
        tab.open(server.url + "/")
        tab.wait("!document.querySelector('#key-row').hidden")
        send(tab, "say: no")
        tab.wait("document.querySelector('.turn.failed') !== null")
        tab.evaluate("settings.elements.key.value = 'secret'")
        send(tab, "say: yes")
        tab.wait(f"document.querySelectorAll('.turn').length === 4 && {DONE}")
        assert tab.evaluate(SAID) == "yes"
        tab.evaluate("sessionStorage.clear()")
