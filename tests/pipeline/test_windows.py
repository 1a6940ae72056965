import pytest

from pipeline.errors import UserError
from pipeline.windows import plan_window


def test_defaults_of_a_model_with_room() -> None:
    plan = plan_window(8192, sinks=60, question_tokens=40)
    assert (plan.window, plan.segment_tokens, plan.answer_tokens) == (2048, 1000, 256)
    assert plan.room == 2048 - 40 - 256
    assert plan.group == 6
    assert plan.excursion == 296


def test_defaults_shrink_with_the_model() -> None:
    plan = plan_window(512, sinks=60, question_tokens=40)
    assert plan.window == 451
    assert plan.sinks + plan.window + 1 <= 512
    assert plan.segment_tokens + plan.question_tokens + plan.answer_tokens <= plan.window


def test_without_questions_the_segment_may_fill_the_window() -> None:
    plan = plan_window(512, sinks=11, question_tokens=400, asks=False)
    assert (plan.window, plan.segment_tokens, plan.excursion) == (500, 500, 0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": 1000}, r"60 \+ 1000 \+ 1 = 1061 tokens.*trained for 1024.*--window 963"),
        ({"segment_tokens": 900}, r"900 \+ 40 \+ 120 = 1060.*window of 963"),
        ({"answer_tokens": 900}, r"exceed the window of 963"),
        ({"window": 200, "answer_tokens": 80, "segment_tokens": 60}, r"two notes of 80 tokens"),
        ({"sinks": 1024}, r"shorter --prompt"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(options: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        plan_window(1024, **{"sinks": 60, "question_tokens": 40, **options})
