"""Guided answers: masks are exactly the tokens that leave a match possible, whatever the tokenizer; clear refusals."""

import itertools
import json
import random
import re
import threading

import numpy as np
import pytest
import tiny
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ttpu_core.errors import RequestError
from ttpu_core.generation.sampling_params import GuidedDecoding
from ttpu_serve.execution.logit_rules import mask_of
from ttpu_serve.guided import guides as guided_module
from ttpu_serve.guided.guides import Guide, GuideFactory, GuideState
from ttpu_serve.guided.token_bytes import token_bytes
from ttpu_serve.reasoning_parsers.formats import Delimited
from ttpu_serve.server.tokens import Tokens

TEXT = ['abab abc é éa ab ab cab 12 123 {"a": 12, "b": [1, 2]} true null "abc" "é"\n'] * 3
PADDING = 70  # rows of the model's logits beyond the tokenizer's tokens


def byte_level():
    """Like llama 3's and qwen's: two tokens that end an answer, and `<think>`, which is added but not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|eos|>", "<|eot_id|>")])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("b c", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>"), ["<|eos|>", "<|eot_id|>"]


def byte_fallback(prepend: bool):
    """Like llama 2's and mistral's (`prepend`), or gemma's; bytes and letters are often two tokens of the same text."""
    pieces = [*'ab12{}[]:," \n', "é", "ab", "▁a", "▁ab", "▁", "▁▁", "12", '":']
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {name: place for place, name in enumerate(dict.fromkeys(name.replace(" ", "▁") for name in names))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")], unk_token="<unk>", byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prepend else replace
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if prepend else stages)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"), ["</s>"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    tiny.write_tokenizer(folder)
    return {
        "bytes": (AutoTokenizer.from_pretrained(str(folder)), ["</s>"]),
        "byte-level": byte_level(),
        "llama 2": byte_fallback(prepend=True),
        "gemma": byte_fallback(prepend=False),
    }


NAMES = ["bytes", "byte-level", "llama 2", "gemma"]


def factory_of(tokenizers, name):
    tokenizer, ends = tokenizers[name]
    size = len(tokenizer) + PADDING
    return GuideFactory(tokenizer, size - 30, size, tokenizer.convert_tokens_to_ids(ends))


@pytest.fixture(scope="module")
def factories(tokenizers):
    return {name: factory_of(tokenizers, name) for name in NAMES}


def tokens_in(mask):
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def allowed(guide: Guide):
    mask = np.full(guide.factory.words, 0xFFFFFFFF, np.uint32)
    guide.fill(mask)
    return tokens_in(mask)


def written(tokenizers, name):
    """token → bytes, by the tokenizer's own decoder, which is asked in the middle of a text."""
    tokenizer, _ = tokenizers[name]
    texts = {}
    for token in set(range(len(tokenizer))) - set(tokenizer.all_special_ids) - special_looking(tokenizer):
        text = tokenizer.backend_tokenizer.decode([*anchor(tokenizer), token], skip_special_tokens=False)
        if "\ufffd" not in text:
            texts[token] = text.removeprefix("a").encode()
    return texts


def anchor(tokenizer):
    return [tokenizer.convert_tokens_to_ids("a")]


def special_looking(tokenizer):
    return {token for text, token in tokenizer.get_added_vocab().items() if text.startswith("<")}


def with_raw_bytes(tokenizers, name):
    """Those that are no text alone, too, which the decoder does not tell: by how each kind of tokenizer is made."""
    tokenizer, _ = tokenizers[name]
    if name in ("llama 2", "gemma"):
        raw = {3 + byte: bytes([byte]) for byte in range(255)}
    else:
        vocab = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
        raw = {token: bytes(map(tiny._byte_of_letter, text)) for text, token in vocab.items()}
    return {token: text for token, text in raw.items() if b"\xff" not in text} | written(tokenizers, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_tokens_bytes_are_what_its_decoder_writes(tokenizers, name):
    tokenizer, _ = tokenizers[name]
    found = token_bytes(tokenizer, len(tokenizer) + 5)
    expected = written(tokenizers, name)
    assert len(expected) > 100
    for token, text in expected.items():
        assert found.tokens[token] == text, tokenizer.convert_ids_to_tokens(token)
    assert found.tokens[-5:] == [b""] * 5
    assert set(tokenizer.all_special_ids) <= set(found.special)


def language(regex, alphabet, longest):
    texts = ("".join(letters) for size in range(longest + 1) for letters in itertools.product(alphabet, repeat=size))
    return {text.encode() for text in texts if re.fullmatch(regex, text)}


CASES = [
    ("regex", r"a(b|cc)?b?", "abc", 5),
    ("regex", r"(?:ab|a)(?:b|bc)", "abc", 5),
    ("regex", r"[ab]{2,3}é?", "abé", 4),
    ("regex", r"(é| )?[ab]", "aé b", 3),
    ("regex", r"^(/|\\)\x61$", "/\\a", 3),
    ("regex", r"", "ab", 2),
    ("regex", r"(?:12?)*", "12", 6),
    ("choice", ("a", "ab", "ab ab", 'é/"\\\n'), None, None),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind,what,alphabet,longest", CASES, ids=[str(case[1]) for case in CASES])
def test_a_mask_is_exactly_the_tokens_that_can_be_completed(tokenizers, factories, name, kind, what, alphabet, longest):
    """Brute force: every prefix of every match that tokens can write, and at each of them every token."""
    factory = factories[name]
    matches = {text.encode() for text in what} if kind == "choice" else language(what, alphabet, longest)
    unbounded = kind == "regex" and what.endswith("*")
    prefixes = {text[:size] for text in matches for size in range(len(text) + 1)}
    texts = with_raw_bytes(tokenizers, name)
    guide = factory.compile(GuidedDecoding(**{kind: what}))
    chance = random.Random(0)
    seen = set()

    def visit(prefix):
        seen.add(prefix)
        ends = factory.stop_ids if prefix in matches else set()
        expected = {token for token, text in texts.items() if text and prefix + text in prefixes} | ends
        assert allowed(guide) == expected, prefix
        for token in chance.sample(range(factory.vocab_size + 40), 20):
            assert guide.accept(token) == (token in expected), (prefix, token)
            if token in expected:
                guide.rollback(1)
        for token in expected - factory.stop_ids:
            if prefix + texts[token] not in seen and not (unbounded and len(prefix + texts[token]) > longest - 3):
                assert guide.accept(token)
                visit(prefix + texts[token])
                guide.rollback(1)
        assert allowed(guide) == expected, "rolling back leads to the same mask"

    visit(b"")
    assert guide.error is None


def test_all_ways_of_cutting_a_text_lead_to_the_same_mask(factories):
    guide = factories["llama 2"].compile(GuidedDecoding(regex="(ab|1)*2"))
    letters = [3 + ord("a"), 3 + ord("b")]
    for token in letters:
        assert guide.accept(token)
    mask = allowed(guide)
    guide.rollback(2)
    whole = next(token for token, text in enumerate(factories["llama 2"]._vocabulary().tokens) if text == b"ab")
    assert guide.accept(whole)
    assert allowed(guide) == mask


def write(guide, tokenizer, text):
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert guide.accept(token), (text, token)


@pytest.mark.parametrize("name", NAMES)
def test_a_finished_guide_forces_every_end_of_the_model(tokenizers, factories, name):
    factory = factories[name]
    guide = factory.compile(GuidedDecoding(choice=["a", "b"]))
    assert not allowed(guide) & factory.stop_ids
    write(guide, tokenizers["bytes"][0], "a") if name == "bytes" else guide.accept(min(allowed(guide)))
    assert guide.finished
    assert allowed(guide) == factory.stop_ids
    end = max(factory.stop_ids)
    assert guide.accept(end) and guide.finished
    assert allowed(guide) == factory.stop_ids
    guide.rollback(1)
    assert guide.finished and allowed(guide) == factory.stop_ids
    guide.rollback(1)
    assert not guide.finished and not allowed(guide) & factory.stop_ids


def test_a_model_without_an_end_is_done_when_its_guide_is(tokenizers):
    guide = GuideFactory(tokenizers["bytes"][0], 259, 288, ()).compile(GuidedDecoding(choice=["ab"]))
    assert allowed(guide) == {ord("a")}
    assert guide.accept(ord("a")) and not guide.finished
    assert guide.accept(ord("b")) and guide.finished
    assert allowed(guide) == set(range(259)), "what is sampled now is dropped, but it must be a token"


def follow(guide, chance, longest=3000):
    """Tokens drawn from the masks until an end is drawn, which is drawn wherever it may be."""
    tokens = []
    while len(tokens) < longest:
        choices = allowed(guide)
        assert choices
        ends = choices & guide.factory.stop_ids
        token = min(ends) if ends else chance.choice(sorted(choices))
        assert guide.accept(token)
        if ends:
            return tokens
        tokens.append(token)
    raise AssertionError("never came to an end")


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "yé"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def test_what_comes_before_a_form_is_free_and_has_no_end(tokenizers, factories):
    tokenizer, factory = tokenizers["byte-level"][0], factories["byte-level"]
    thought = Delimited(("<think>",), ("</think>",))
    prelude = thought.prelude("", "", Tokens(tokenizer).terminal)
    guide = factory.compile(GuidedDecoding(choice=["a", "b"], prelude=prelude))
    opening = tokenizer.convert_tokens_to_ids("<think>")
    assert {opening, tokenizer.convert_tokens_to_ids("a")} <= allowed(guide) and not allowed(guide) & factory.stop_ids
    assert guide.accept(opening)
    free = allowed(guide)
    assert not free & factory.stop_ids and len(free) > 200
    write(guide, tokenizer, "b 12 </think")
    assert not guide.finished
    write(guide, tokenizer, ">\n")
    assert not allowed(guide) & factory.stop_ids and len(allowed(guide)) <= 4
    write(guide, tokenizer, "b")
    assert guide.finished


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["object", "text"])
def test_whatever_is_drawn_under_a_schema_is_valid(tokenizers, factories, name, schema):
    tokens = factories[name]._vocabulary().tokens
    for seed in range(3):
        drawn = follow(factories[name].compile(GuidedDecoding(json=schema)), random.Random(seed))
        answer = json.loads(b"".join(tokens[token] for token in drawn))
        assert set(answer) == {"name", "age", "tags"}
        assert isinstance(answer["name"], str) and len(answer["name"]) <= 5
        assert isinstance(answer["age"], int) and 0 <= answer["age"] <= 150
        assert set(answer["tags"]) <= {"x", "yé"} and len(answer["tags"]) <= 3


@pytest.mark.parametrize("text,whole", [("{}", True), ('{"a": [1, {"b": null}]}', True), ("[1]", False), ("1", False)])
def test_json_true_is_any_object(tokenizers, factories, text, whole):
    guide = factories["bytes"].compile(GuidedDecoding(json=True))
    tokens = tokenizers["bytes"][0].encode(text, add_special_tokens=False)
    assert (guide.legal_prefix(tokens) == len(tokens)) == whole
    assert not allowed(guide) & factories["bytes"].stop_ids


def test_json_cannot_go_on_with_blanks_for_ever(tokenizers, factories):
    guide = factories["bytes"].compile(GuidedDecoding(json=True))
    write(guide, tokenizers["bytes"][0], "{ ")
    assert ord("\n") not in allowed(guide)
    assert ord(" ") not in allowed(guide) and ord('"') in allowed(guide)
    compact = {"type": "object", "x-guidance": {"whitespace_flexible": False}}
    guide = factories["bytes"].compile(GuidedDecoding(json=compact))
    write(guide, tokenizers["bytes"][0], "{")
    assert allowed(guide) == {ord("}"), ord('"')}


LARK = """
start: sum
sum: NUMBER (("+" | "-") sum)? | "(" sum ")"
NUMBER: /[0-9]+/
"""
GBNF = """
root ::= number (("+" | "-") root)? | "(" root ")"
number ::= [0-9]+
"""


@pytest.mark.parametrize("grammar", [LARK, GBNF, json.dumps({"grammars": [{"lark_grammar": LARK}]})])
@pytest.mark.parametrize("text,legal", [("(1+(2-30))", 10), ("1+2+3", 5), ("(1))", 3), ("+1", 0)])
def test_grammars_in_lark_gbnf_and_llguidances_own_form(tokenizers, factories, grammar, text, legal):
    guide = factories["bytes"].compile(GuidedDecoding(grammar=grammar))
    assert guide.legal_prefix(tokenizers["bytes"][0].encode(text, add_special_tokens=False)) == legal


def test_grammars_name_special_tokens(tokenizers, factories):
    tokenizer, _ = tokenizers["byte-level"]
    think, end = tokenizer.convert_tokens_to_ids(["<think>", "<|eot_id|>"])
    guide = factories["byte-level"].compile(GuidedDecoding(grammar='start: <think> "a" <|eot_id|>'))
    assert allowed(guide) == {think}
    assert guide.accept(think)
    write(guide, tokenizer, "a")
    assert allowed(guide) == {end}, "the grammar names one of the two ends"
    assert guide.accept(end)
    assert guide.finished


@pytest.mark.parametrize(
    "what,said",
    [
        ({"regex": "a["}, "regular expression (unclosed character class): correct it"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json": "{"}, "JSON schema (it is not JSON"),
        ({"json": "[1]"}, "JSON schema (it is a list, not an object)"),
        ({"json": "[" * 100_000}, "it is nested too deeply"),
        ({"json": {"const": {1}}}, "it is not JSON"),
        ({"json": {"const": "\ud800"}}, "JSON schema ("),
        ({"regex": "\ud800"}, "half a character"),
        ({"choice": ["\ud800"]}, "choice ("),
        ({"json": {"type": "foo"}}, "Invalid type: foo"),
        ({"json": {"type": "object", "not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"json": {"type": "string", "format": "shoe-size"}}, "Unknown format: shoe-size"),
        ({"json": {"$ref": "https://example.com/x"}}, "JSON schema ("),
        ({"json": False, "choice": ["a"], "grammar": None, "regex": None} | {"choice": ()}, "choice"),
        ({"grammar": "start: foo"}, 'grammar (unknown name: "foo")'),
        ({"grammar": "begin: /a/"}, "grammar ("),
        ({"grammar": "root ::= ("}, "grammar (it cannot be read as GBNF"),
        ({"grammar": '{"a": 1}'}, "starts with a brace"),
        ({"grammar": '{"grammars": [}'}, "it is not JSON"),
        ({"grammar": 'start: a "b"\na[temperature=0.5]: /x+/'}, "temperature= needs an engine"),
        ({"grammar": 'start: a "b"\na[stop="x"]: /.*/'}, "stop= needs an engine"),
        ({"grammar": "start: A\nA: /a/ & /b/"}, "grammar ("),
        ({"grammar": "start: <|nobody|>"}, "grammar ("),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_what_cannot_be_followed_is_refused_in_one_sentence(factories, what, said):
    for _ in range(2):  # a refusal is remembered, too
        with pytest.raises(RequestError) as caught:
            factories["bytes"].compile(GuidedDecoding(**what))
        message = str(caught.value)
        assert said in message
        assert "\n" not in message and len(message) < 420 and message.endswith(".")


def test_a_checkpoint_without_a_tokenizer_cannot_be_guided():
    with pytest.raises(RequestError, match="this checkpoint has none"):
        GuideFactory(None, 2, 32, [1]).compile(GuidedDecoding(regex="a"))


def test_a_lark_grammar_may_write_what_gbnf_begins_with(tokenizers, factories):
    guide = factories["bytes"].compile(GuidedDecoding(grammar='start: "a" "::=" "b"'))
    write(guide, tokenizers["bytes"][0], "a::=b")
    assert guide.finished


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), None], ids=["WordPiece", "none"])
def test_a_tokenizer_whose_bytes_are_unknown_is_refused(decoder):
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    factory = GuideFactory(PreTrainedTokenizerFast(tokenizer_object=backend), 2, 32, [1])
    with pytest.raises(RequestError, match=r"bytes of each token.*leave the guide out"):
        factory.compile(GuidedDecoding(regex="a"))


def test_a_text_that_no_token_can_write_ends_with_an_error():
    """A vocabulary without `b`: `ab` is begun, since its grammar knows nothing of the tokenizer, but not completed."""
    backend = Tokenizer(models.BPE(vocab={"a": 0, "c": 1, "</s>": 2}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    factory = GuideFactory(PreTrainedTokenizerFast(tokenizer_object=backend), 3, 3, [2])
    with pytest.raises(RequestError, match="no text that this tokenizer can write"):
        factory.compile(GuidedDecoding(regex="b"))
    state = GuideState(factory.compile(GuidedDecoding(regex="ab|cc")))
    assert [tokens_in(mask) for mask in state.masks([0])] == [{0, 1}, {2}]
    assert state.error is None, "a draft that leads to a dead end is no error of the answer"
    assert [tokens_in(mask) for mask in state.masks()] == [{0, 1}]
    assert state.advance([0]) == 1
    assert [tokens_in(mask) for mask in state.masks()] == [{2}]
    assert state.error is not None and "cannot go on" in state.error
    assert state.finished


def test_grammars_are_compiled_once_and_the_oldest_forgotten(factories, tokenizers, monkeypatch):
    factory = factory_of(tokenizers, "bytes")
    compiled = []
    original = GuideFactory._matcher
    monkeypatch.setattr(GuideFactory, "_matcher", lambda *given: compiled.append(given[1]) or original(*given))
    monkeypatch.setattr(guided_module, "CACHED_GRAMMARS", 2)
    first, again = (factory.compile(GuidedDecoding(json={"type": "object"})) for _ in range(2))
    assert factory.compile(GuidedDecoding(json='{"type":  "object"}')) is not None
    assert len(compiled) == 1
    assert first.accept(ord("{")) and again.accept(ord("{")), "guides of one grammar move on their own"
    for regex in ("a", "b", "a"):
        factory.compile(GuidedDecoding(regex=regex))
    assert len(compiled) == 3
    factory.compile(GuidedDecoding(json={"type": "object"}))
    assert len(compiled) == 4


def test_many_threads_may_compile_at_once(factories, tokenizers, monkeypatch):
    factory = factory_of(tokenizers, "byte-level")
    compiled = []
    original = GuideFactory._matcher
    monkeypatch.setattr(GuideFactory, "_matcher", lambda *given: compiled.append(given[1]) or original(*given))
    barrier = threading.Barrier(8)
    wrong = []

    def work(seed):
        barrier.wait()
        try:
            for regex in ("a{1,3}b", "[0-9]{2}", "a["):
                try:
                    follow(factory.compile(GuidedDecoding(regex=regex)), random.Random(seed))
                except RequestError:
                    assert regex == "a["
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(compiled) == 3


# Speculation


def test_each_drafts_mask_is_that_of_the_answer_so_far(tokenizers, factories):
    tokenizer, factory = tokenizers["bytes"][0], factories["bytes"]
    draft = tokenizer.encode('{"a":1}', add_special_tokens=False)
    state = GuideState(factory.compile(GuidedDecoding(json=True)))
    guide = factory.compile(GuidedDecoding(json=True))
    before = tokens_in(state.masks()[0])
    masks = state.masks([*draft, factory_end(factory)])
    for token, mask in zip(draft, masks, strict=False):
        assert tokens_in(mask) == allowed(guide)
        guide.accept(token)
    assert len(masks) == len(draft) + 2
    assert tokens_in(masks[-2]) == tokens_in(masks[-1]) == factory.stop_ids
    assert tokens_in(state.masks()[0]) == before, "drafts move nothing"
    assert state.advance(draft[:3]) == 3
    assert state.masks()[0].tolist() == masks[3].tolist()


def factory_end(factory):
    return min(factory.stop_ids)


def test_drafts_are_cut_where_the_guide_forbids_them(tokenizers, factories):
    factory = factories["bytes"]
    state = GuideState(factory.compile(GuidedDecoding(regex="ab+c")))
    end = factory_end(factory)
    assert state.legal_prefix(list(b"abbx")) == 3
    assert state.legal_prefix([*b"abc", end, end]) == 4
    assert state.legal_prefix([end]) == 0
    assert state.legal_prefix([]) == 0
    masks = state.masks(list(b"axc"))
    assert [tokens_in(mask) for mask in masks] == [{ord("a")}, {ord("b")}, {ord("b")}, {ord("b")}]
    assert state.advance(list(b"abbc")) == 4 and state.finished
    assert state.advance([end]) == 0, "the answer was whole before its end of sequence"


def test_tokens_that_the_guide_forbids_are_not_taken(factories):
    state = GuideState(factories["bytes"].compile(GuidedDecoding(regex="abc")))
    assert state.advance(list(b"ax")) == 1
    assert state.error is not None and "forbids" in state.error


def test_min_tokens_forbids_an_end_that_the_grammar_does_not_force(factories):
    factory = factories["bytes"]
    stops = {*factory.stop_ids, ord("c")}
    state = GuideState(factory.compile(GuidedDecoding(regex="a*b?c?")), min_tokens=2, stop_ids=stops)
    assert [tokens_in(mask) for mask in state.masks(list(b"aa"))] == [
        {ord("a"), ord("b")},
        {ord("a"), ord("b")},
        {*b"abc", *factory.stop_ids},
    ]
    assert tokens_in(state.masks(list(b"b"))[1]) == {ord("c"), *factory.stop_ids}, "nothing else is left"
    state = GuideState(factory.compile(GuidedDecoding(choice=["a"])), min_tokens=2, stop_ids=stops)
    assert tokens_in(state.masks(list(b"a"))[1]) == factory.stop_ids


def test_allowed_tokens_and_a_guide_hold_together(factories):
    factory = factories["bytes"]

    def mask(tokens):
        return mask_of(tokens, factory.words * 32)

    state = GuideState(factory.compile(GuidedDecoding(regex="(a|b)c|d")))
    masks = state.masks(list(b"ac"), [mask(b"acx"), mask(b"ac"), None])
    assert [tokens_in(mask) for mask in masks] == [{ord("a")}, {ord("c")}, factory.stop_ids]
    masks = state.masks(list(b"ac"), [None, mask(b"a"), None])
    assert [tokens_in(mask) for mask in masks] == [{*b"abd"}, {ord("a")}, factory.stop_ids], "each position has its own"
    assert state.error is None, "drafts may not be accepted"
    stuck = GuideState(factory.compile(GuidedDecoding(regex="ab")))
    assert stuck.advance(list(b"a")) == 1 and stuck.error is None
    assert tokens_in(stuck.masks([], [mask(b"a")])[0]) == {ord("a")}
    assert stuck.error is not None and "allowed_token_ids and bad_words" in stuck.error


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_accepting_and_rolling_back_ends_where_it_should(tokenizers, factories, seed):
    factory, chance = factories["byte-level"], random.Random(seed)
    guide = factory.compile(GuidedDecoding(json=SCHEMA))
    history: list[int] = []
    for _ in range(60):
        if chance.random() < 0.3:
            count = chance.randint(0, min(4, len(history)))
            guide.rollback(count)
            del history[len(history) - count :]
        else:
            token = chance.choice(sorted(allowed(guide)))
            assert guide.accept(token)
            history.append(token)
    fresh = factory.compile(GuidedDecoding(json=SCHEMA))
    assert fresh.legal_prefix(history) in (len(history), history.index(end_in(history, factory)) + 1)
    for token in history:
        assert fresh.accept(token)
    assert allowed(fresh) == allowed(guide)


def end_in(history, factory):
    return next((token for token in history if token in factory.stop_ids), history[-1])
