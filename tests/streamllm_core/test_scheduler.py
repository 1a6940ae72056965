"""Which tokens go into a pass: decoding first, reading oldest first, within the budget, nobody starves."""

from __future__ import annotations

import random

import pytest

from streamllm_core import Request, Stream
from streamllm_core.scheduler import Work, add_drafts, plan_pass
from tests.streamllm_core.scripted_drafters import ScriptedDrafter

CHUNK = 100  # tokens of a stream that go together; more than any here has


def reading(tokens: int, fed: int = 0) -> Request:
    return Request(Stream(0, 0), list(range(tokens)), fed=fed)


def decoding(pending: int = 7) -> Request:
    return Request(Stream(0, 0), [1], max_new_tokens=9, fed=1, pending=pending)


def sizes(works: list[Work]) -> list[int]:
    return [len(work.tokens) for work in works]


def test_decode_tokens_come_first_then_prefill_in_order_of_submission() -> None:
    requests = [reading(3), decoding(11), reading(4), decoding(12)]
    works = plan_pass(requests, 100, 50)
    assert [work.request for work in works] == [requests[1], requests[3], requests[0], requests[2]]
    assert [list(work.tokens) for work in works] == [[11], [12], [0, 1, 2], [0, 1, 2, 3]]


def test_the_oldest_prefill_takes_what_is_left_of_the_budget() -> None:
    assert sizes(plan_pass([decoding(), reading(10), reading(10)], 8, 10)) == [1, 7]
    assert sizes(plan_pass([reading(3), reading(10), reading(10)], 8, 10)) == [3, 5]


def test_streams_share_a_pass_in_chunks_and_one_that_is_alone_takes_more() -> None:
    assert sizes(plan_pass([reading(10), reading(10), reading(10)], 8, 3)) == [3, 3, 2]
    assert sizes(plan_pass([reading(10), reading(4), reading(10)], 20, 3)) == [9, 4, 7]
    assert sizes(plan_pass([decoding(), reading(50)], 21, 3)) == [1, 20]


def test_reading_goes_on_where_it_stopped() -> None:
    (work,) = plan_pass([reading(10, fed=6)], 3, 10)
    assert list(work.tokens) == [6, 7, 8]


@pytest.mark.parametrize("decoders", [4, 5, 9])
def test_one_prefill_token_goes_on_when_decoding_fills_the_budget(decoders: int) -> None:
    requests = [*(decoding() for _ in range(decoders)), reading(5), reading(5)]
    assert sizes(plan_pass(requests, 4, 10)) == [1] * decoders + [1]


def test_requests_with_nothing_to_feed_take_no_room() -> None:
    waiting = Request(Stream(0, 0), [], max_new_tokens=3)  # generates from what the stream already holds
    done = reading(4, fed=4)
    assert plan_pass([waiting, done], 8, 10) == []
    assert sizes(plan_pass([waiting, done, reading(20)], 8, 3)) == [8]


def check_rules(requests: list[Request], works: list[Work], budget: int, chunk: int) -> None:
    assert len({id(work.request) for work in works}) == len(works)
    decoders = [request for request in requests if request.pending is not None]
    assert [work.request for work in works[: len(decoders)]] == decoders
    assert all(list(work.tokens) == [work.request.pending] for work in works[: len(decoders)])

    waiting = [r for r in requests if r.pending is None and r.fed < len(r.tokens)]
    prefill = works[len(decoders) :]
    assert [work.request for work in prefill] == waiting[: len(prefill)]  # oldest first, none skipped
    for work in prefill:
        fed = work.request.fed
        assert len(work.tokens) > 0
        assert list(work.tokens) == list(work.request.tokens[fed : fed + len(work.tokens)])
    unfinished = [len(w.tokens) for w in prefill if w.request.fed + len(w.tokens) < len(w.request.tokens)]
    assert unfinished == sorted(unfinished, reverse=True)  # the older ones are a round ahead at most
    assert max(unfinished, default=0) - min(unfinished, default=0) <= chunk
    if len(prefill) < len(waiting):  # somebody got nothing, so nobody got a second round
        assert all(len(work.tokens) <= chunk for work in prefill)

    total = sum(sizes(works))
    assert total <= max(budget, len(decoders) + bool(waiting))
    if waiting:
        assert prefill
        left = sum(len(r.tokens) - r.fed for r in waiting)
        assert total == min(max(budget, len(decoders) + 1), len(decoders) + left)  # and the budget is used


@pytest.mark.parametrize("seed", range(30))
def test_rules_hold_for_random_requests_until_all_are_done(seed: int) -> None:
    chance = random.Random(seed)
    budget, chunk = chance.choice([1, 2, 5, 16, 64]), chance.choice([1, 3, 8, 100])
    queue = [
        Request(Stream(0, 0), chance.choices(range(50), k=chance.randint(1, 60)), max_new_tokens=chance.randint(0, 12))
        for _ in range(chance.randint(1, 25))
    ]
    work_left = sum(len(r.tokens) + max(r.max_new_tokens - 1, 0) for r in queue)
    running: list[Request] = []
    passes = 0
    while queue or running:
        while queue and (not running or chance.random() < 0.3):
            running.append(queue.pop(0))
        works = plan_pass(running, budget, chunk)
        check_rules(running, works, budget, chunk)
        for work in works:
            work.request.absorb(work.tokens)
            work_left -= len(work.tokens)
        for request in running:
            if request.fed == len(request.tokens):
                if request.max_new_tokens:
                    request.accept(chance.randrange(50))
                else:
                    request.finish_reason = "length"
        running = [request for request in running if not request.finish_reason]
        passes += 1
        assert passes < 5000, "some request starves"
    assert work_left == 0


# --- drafts ----------------------------------------------------------------------------------------------------


def drafts_of(requests: list[Request], most: list[int], budget: int, proposals: dict[int, list[int]]) -> list[int]:
    """How many drafted tokens each piece of work carries."""
    drafter = ScriptedDrafter(lambda request, _: proposals.get(request.pending or 0, []))
    works = add_drafts(plan_pass(requests, budget, CHUNK), most, budget, drafter)
    for work in works:
        if work.request.decoding:
            assert list(work.tokens) == [work.request.pending, *proposals.get(work.tokens[0], [])[: work.drafts]]
        else:
            assert work.drafts == 0
    return [work.drafts for work in works]


def test_drafts_follow_the_pending_token_as_far_as_they_are_wanted() -> None:
    requests = [decoding(11), decoding(12), decoding(13), reading(4)]
    proposals = {11: [1, 2, 3, 4], 12: [5], 13: [6, 7]}
    assert drafts_of(requests, [3, 3, 0, 0], 100, proposals) == [3, 1, 0, 0]


def test_the_longest_drafts_are_cut_to_the_room_that_reading_leaves() -> None:
    requests = [decoding(11), decoding(12), decoding(13), reading(10)]
    proposals = {11: [1] * 8, 12: [2, 2], 13: [3] * 8}
    for budget, expected in ((31, [8, 2, 8]), (21, [3, 2, 3]), (20, [2, 2, 2]), (17, [1, 1, 1]), (15, [0, 0, 0])):
        assert drafts_of(requests, [8] * 3 + [0], budget, proposals) == [*expected, 0]
    for budget in (1, 4, 13):
        assert sum(drafts_of(requests, [8] * 3 + [0], budget, proposals)) == 0


def test_nothing_is_proposed_when_there_is_no_room_or_nothing_to_draft_for() -> None:
    drafter = ScriptedDrafter(lambda request, most: 1 // 0)
    for requests, most, budget in (
        ([decoding()], [3], 1),
        ([reading(5)], [0], 50),
        ([decoding()], [0], 50),
        ([], [], 9),
    ):
        works = plan_pass(requests, budget, CHUNK)
        assert add_drafts(works, most, budget, drafter) == works


def test_drafts_end_before_a_stop_token() -> None:
    request = decoding(11)
    request.stop = frozenset({5})
    assert drafts_of([request], [8], 50, {11: [1, 2, 5, 3]}) == [2]
    assert drafts_of([request], [8], 50, {11: [5, 3]}) == [0]


def test_no_more_is_drafted_than_the_answer_may_grow() -> None:
    request = Request(Stream(0, 0), [1], max_new_tokens=9, most_drafts=8)
    assert [request.acceptable for request.generated in ([1], [1] * 4, [1] * 7, [1] * 8)] == [7, 4, 1, 0]
    request.most_drafts = 2
    request.generated = [1]
    assert request.acceptable == 2
