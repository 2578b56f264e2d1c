"""The training text of the demo checkpoint: the Python language documentation that every Python contains
(`pydoc_data.topics`). The module trains a tokenizer on it and yields rows of its tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CONTEXT = 512
VOCABULARY = 2048
PAD, BOS, EOS, USER, ASSISTANT = SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")
PAD_ID, BOS_ID, EOS_ID, USER_ID, ASSISTANT_ID = range(len(SPECIAL))
HELD_OUT_EVERY = 25  # one passage in 25 is held out
ASCII = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "…": "...", "\xa0": " "})

UNDERLINE = re.compile(r"[*=\-~^]{3,}")
QUOTED = re.compile(r"\"([\w.@*/+<>=%-]+(?:\([\w, *.=]*\))?)\"")  # "with", "__exit__()", "collections.abc"

# One question and its answer are one passage of training, so a conversation is rendered turn by turn.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] | trim }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] | trim + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
QUESTIONS = ("{}", "{}?", "What is {}?", "What are {}?", "Explain {}", "Explain {}.", "Tell me about {}", "help({!r})")


@dataclass(frozen=True)
class Section:
    """A titled section of documentation. `names` are the names that a user may call it by."""

    names: tuple[str, ...]
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """Token sequences. `starts` are the indices of paragraphs in `stream`; `chats` are questions with their answers."""

    stream: np.ndarray
    starts: np.ndarray
    chats: tuple[np.ndarray, ...]
    held_out: tuple[np.ndarray, ...]


def read_topics() -> list[tuple[str, list[str]]]:
    """Topics by name, each as its paragraphs. A topic whose text is nearly contained in a longer one is left out."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    kept: list[tuple[str, list[str]]] = []
    for name, text in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        paragraphs = [clean(p) for p in re.split(r"\n\s*\n", text.strip("\n")) if p.strip()]
        new = sum(len(p) for p in paragraphs if p not in seen)
        if new > 0.1 * sum(map(len, paragraphs)):
            kept.append((name, paragraphs))
            seen.update(paragraphs)
    return sorted(kept)


def clean(paragraph: str) -> str:
    """Prose on one line, so that a sentence is the same tokens wherever it once was wrapped; prose and titles without
    the quotes around keywords and names, as a user types them; code, grammar and tables as they are. Plain quotes and
    dashes everywhere."""
    paragraph = paragraph.translate(ASCII).rstrip()
    lines = paragraph.split("\n")
    if len(lines) == 2 and UNDERLINE.fullmatch(lines[1]):
        title = QUOTED.sub(r"\1", lines[0])
        return f"{title}\n{lines[1][0] * len(title)}"
    indents = {len(line) - len(line.lstrip()) for line in lines[1:]}
    wrapped = len(lines) > 1 and len(indents) == 1 and all(len(line) > 50 for line in lines[:-1])
    sentence = len(lines) == 1 and re.fullmatch(r"[\s*\d.]*[A-Z].* .*[.:]", paragraph)
    if not (wrapped or sentence) or any(mark in paragraph for mark in ("::=", ">>>", "| ", "***", "===", "---")):
        return paragraph
    lead = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    prose = re.sub(r"(?<=[.,:;?!)\"]) {2,}", " ", " ".join(line.strip() for line in lines))
    return lead + QUOTED.sub(r"\1", prose)


def sections(topics: list[tuple[str, list[str]]]) -> Iterator[Section]:
    """Each topic cut at its underlined titles. A title goes by the name of its topic too: what `help("with")` shows is
    "The with statement"."""
    from pydoc_data.topics import topics as all_topics

    aliases = {QUOTED.sub(r"\1", text.partition("\n")[0].translate(ASCII)): name for name, text in all_topics.items()}
    for name, paragraphs in topics:
        names: tuple[str, ...] = (name,)
        body: list[str] = []
        for paragraph in paragraphs:
            title, _, rule = paragraph.partition("\n")
            if UNDERLINE.fullmatch(rule):
                if body:
                    yield Section(names, tuple(body))
                    names, body = (), []
                titles = (aliases.get(title), title.replace('"', ""))
                names = tuple(dict.fromkeys((*names, *filter(None, titles))))
            else:
                body.append(paragraph)
        if body:
            yield Section(names, tuple(body))


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer without loss that puts BOS in front of every text.

    A run of newlines is never merged with its surroundings, so a paragraph has the same tokens wherever it stands."""
    tokenizer = Tokenizer(models.BPE())
    newlines = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    bytes_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([newlines, bytes_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def passages(topics: list[tuple[str, list[str]]]) -> Iterator[tuple[list[str], bool]]:
    """Runs of about 2000 characters of paragraphs, and whether a topic ends after them."""
    for _, paragraphs in topics:
        begin = 0
        for end in range(1, len(paragraphs) + 1):
            last = end == len(paragraphs)
            if last or sum(map(len, paragraphs[begin:end])) > 2000:
                yield paragraphs[begin:end], last
                begin = end


def build_corpus(topics: list[tuple[str, list[str]]], tokenizer: Tokenizer) -> Corpus:
    """Tokenize the topics. One passage in `HELD_OUT_EVERY` is held out, and its paragraphs are left out everywhere."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    everything = list(passages(topics))
    held_out = [passage for passage, _ in everything[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]]
    hidden = {paragraph for passage in held_out for paragraph in passage}
    stream: list[int] = []
    starts: list[int] = []
    for passage, topic_ends in everything:
        for paragraph in passage:
            if paragraph not in hidden:
                starts.append(len(stream))
                stream += encode(paragraph + "\n\n")
        stream += [EOS_ID] * topic_ends
    chats = []
    for section in sections(topics):
        answer = encode("\n\n".join(p for p in section.paragraphs if p not in hidden))
        if not answer:
            continue
        for question in dict.fromkeys(q.format(name) for q in QUESTIONS for name in section.names):
            for asked in dict.fromkeys((question, question.lower())):
                chat = [BOS_ID, USER_ID, *encode(asked), ASSISTANT_ID, *answer, EOS_ID]
                chats.append(np.array(chat[:CONTEXT], np.int32))
    return Corpus(
        np.array(stream, np.int32),
        np.array(starts, np.int32),
        tuple(chats),
        tuple(np.array([BOS_ID, *encode("\n\n".join(passage))], np.int32) for passage in held_out),
    )


def rows(corpus: Corpus) -> Iterator[np.ndarray]:
    """The text in rows of a BOS and up to CONTEXT - 1 tokens, one from each paragraph on."""
    for start in corpus.starts:
        yield np.concatenate([np.array([BOS_ID], np.int32), corpus.stream[start : start + CONTEXT - 1]])


def windows(corpus: Corpus) -> Iterator[np.ndarray]:
    """The text in rows of a BOS and up to CONTEXT - 1 tokens, each token in one row."""
    for start in range(0, len(corpus.stream), CONTEXT - 1):
        yield np.concatenate([np.array([BOS_ID], np.int32), corpus.stream[start : start + CONTEXT - 1]])
