"""A device without a model, for tests of the scheduler. In: scheduled steps; out: tokens that depend on everything that
the cache must hold. A page entry is a digest of its token, of the entry before it and of the first entry that its layer
sees, each read through the block table: one wrong page, a page written too late or given back too soon, and all later
tokens of that request differ from `answer_alone`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ttpu_serve.runner import NULL_PAGE
from ttpu_serve.scheduling.block_table import PageGroup
from ttpu_serve.scheduling.request import Request
from ttpu_serve.scheduling.scheduler import ScheduledStep, Scheduler

VOCAB = 50


def _entry(group: int, before: int, seen: int, token: int) -> int:
    return hash((group, before, seen, token))


def _sampled(entries: Sequence[int], seed: int) -> int:
    return hash((*entries, seed)) % VOCAB


def _first_seen(group: PageGroup, position: int) -> int:
    return max(group.first_seen(position), 0)


def answer_alone(groups: Sequence[PageGroup], request: Request, count: int) -> list[int]:
    """The oracle: `count` tokens after the prompt, without pages or a scheduler."""
    tokens = list(request.prompt)
    entries: list[list[int]] = [[] for _ in groups]
    salt = hash(request.salt)
    for position in range(len(request.prompt) + count - 1):
        for index, group in enumerate(groups):
            first = _first_seen(group, position)
            before = entries[index][position - 1] if position > first else salt if position == 0 else 0
            seen = entries[index][first] if first < position else 0
            entries[index].append(_entry(index, before, seen, tokens[position]))
        if position >= len(request.prompt) - 1:
            tokens.append(_sampled([row[position] for row in entries], len(tokens)))
    return tokens[len(request.prompt) :]


class NullDevice:
    """Runs steps in the order in which they are dispatched, at once; the host may look at their tokens later."""

    def __init__(self, scheduler: Scheduler, groups: Sequence[PageGroup]) -> None:
        self.scheduler, self.groups = scheduler, tuple(groups)
        self.page_size = scheduler.config.page_size
        self.entries = [np.zeros(group.num_pages * self.page_size, object) for group in groups]
        self.last_tokens = [-1] * scheduler.config.max_num_seqs

    def run(self, step: ScheduledStep) -> list[list[int]]:
        """Per row the tokens that the step gives: drafts that held, and one more."""
        results = []
        for row, request in enumerate(step.requests):
            start, count = int(step.starts[row]), int(step.counts[row])
            drafts = step.drafts[row] if step.drafts else []
            tokens = request.tokens(start, min(start + count - len(drafts), request.known))
            if start + count - len(drafts) > request.known:  # the newest token is known to the device alone
                tokens = [*tokens, self.last_tokens[step.slots[row]]]
            tokens = tokens + drafts
            assert len(tokens) == count
            given: list[int] = []
            for offset, token in enumerate(tokens):
                entries = self._write(int(step.slots[row]), start + offset, token, request)
                held = offset - (count - len(drafts) - 1)  # drafts that this position has read
                if step.samples[row] and held >= 0 and given == drafts[:held]:
                    given.append(_sampled(entries, start + offset + 1))
            if given:
                self.last_tokens[step.slots[row]] = given[-1]
            results.append(given)
        return results

    def _write(self, slot: int, position: int, token: int, request: Request) -> list[int]:
        written = []
        for index, (group, table) in enumerate(zip(self.groups, self.scheduler.tables, strict=True)):
            first = _first_seen(group, position)
            before = self._at(index, slot, position - 1) if position > first else 0
            if position == 0:
                before = hash(request.salt)
            seen = self._at(index, slot, first) if first < position else 0
            page = int(table[slot, position // self.page_size])
            assert page != NULL_PAGE, "a token has no page to be written to"
            written.append(_entry(index, before, seen, token))
            self.entries[index][page * self.page_size + position % self.page_size] = written[-1]
        return written

    def _at(self, group: int, slot: int, position: int) -> int:
        page = int(self.scheduler.tables[group][slot, position // self.page_size])
        assert page != NULL_PAGE, "a page was given back while its tokens are still seen"
        return self.entries[group][page * self.page_size + position % self.page_size]
