"""Drafters for tests: the truth, parts of it, rubbish, too much of anything."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from streamllm_core import Request, Stream

Script = Callable[[Request, int], list[int]]


class ScriptedDrafter:
    """Proposes what ``script(request, most)`` says."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.forgotten: list[Stream] = []

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        assert all(request.pending is not None for request in requests)
        assert all(count > 0 for count in most)
        return [self.script(request, count) for request, count in zip(requests, most, strict=True)]

    def forget(self, stream: Stream) -> None:
        self.forgotten.append(stream)


def truth(answers: dict[int, list[int]]) -> Script:
    """What follows in the known answer to a request; ``answers`` by ``id(request.stream)``."""
    return lambda request, most: answers[id(request.stream)][len(request.generated) :][:most]


def lies(vocabulary: int, answers: dict[int, list[int]]) -> Script:
    """Never what follows: every draft is rejected."""

    def script(request: Request, most: int) -> list[int]:
        return [(token + 1) % vocabulary for token in truth(answers)(request, most)]

    return script


def mixture(seed: int, vocabulary: int, answers: dict[int, list[int]]) -> Script:
    """By chance: nothing, rubbish, the truth up to some token, the truth and more than asked for, stop tokens."""
    chance = random.Random(seed)

    def script(request: Request, most: int) -> list[int]:
        known = answers[id(request.stream)][len(request.generated) :]
        right = known[: chance.randint(0, most + 3)]
        wrong = chance.choices(range(vocabulary), k=chance.randint(0, 2 * most))
        return chance.choice([[], wrong, right, right + wrong, right + sorted(request.stop) + wrong])

    return script
