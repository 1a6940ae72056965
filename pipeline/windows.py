"""How a model's window is shared between the text, the questions and the answers."""

from dataclasses import dataclass

from pipeline.errors import UserError

WINDOW = 2048
SEGMENT_TOKENS = 1000
ANSWER_TOKENS = 256

_LEAST_SEGMENT = 16
_BETWEEN_NOTES = 8  # tokens that part two notes, generously
_MOST_NOTES = 8  # a weak model loses track of more


@dataclass(frozen=True)
class WindowPlan:
    """Tokens. A question is always asked about text that is still in the window when its answer ends."""

    sinks: int
    window: int
    segment_tokens: int
    question_tokens: int
    answer_tokens: int

    @property
    def room(self) -> int:
        """Text that the window holds beside a question and its answer."""
        return self.window - self.question_tokens - self.answer_tokens

    @property
    def group(self) -> int:
        """How many notes are merged at a time."""
        return max(2, min(_MOST_NOTES, self.room // (self.answer_tokens + _BETWEEN_NOTES)))

    @property
    def excursion(self) -> int:
        """The longest question with its answer."""
        return self.question_tokens + self.answer_tokens


def plan_window(
    trained: int,
    *,
    sinks: int,
    question_tokens: int,
    asks: bool = True,
    window: int | None = None,
    segment_tokens: int | None = None,
    answer_tokens: int | None = None,
) -> WindowPlan:
    """Share the window out; what is None takes its default, less where the model was trained for less.

    `trained` is the model's context, `sinks` the longest pin, `question_tokens` the longest question. Without `asks`
    there are no questions and answers. Raises UserError, with the numbers, when segment + question + answer exceed
    the window, or sinks + window + 1 the context.
    """
    most = trained - sinks - 1
    if window is None:
        window = min(WINDOW, most)
    if window > most or window < 1:
        raise UserError(
            f"sinks + window + 1 = {sinks} + {window} + 1 = {sinks + window + 1} tokens, "
            f"but the model was trained for {trained}; "
            + (f"use --window {most} or less" if most >= 1 else "use a shorter --prompt")
        )
    if not asks:
        question_tokens = answer_tokens = 0
    elif answer_tokens is None:
        answer_tokens = min(ANSWER_TOKENS, max(1, window // 8))
    if segment_tokens is None:
        segment_tokens = max(_LEAST_SEGMENT, min(SEGMENT_TOKENS, window - question_tokens - answer_tokens))
    needed = segment_tokens + question_tokens + answer_tokens
    if needed > window:
        raise UserError(
            f"segment + question + answer = {segment_tokens} + {question_tokens} + {answer_tokens} = {needed} tokens "
            f"exceed the window of {window}, so the start of a segment would be forgotten before its answer is done; "
            f"lower --segment-tokens or --max-new-tokens, shorten the prompts, or raise --window (at most {most})"
        )
    plan = WindowPlan(sinks, window, segment_tokens, question_tokens, answer_tokens)
    if asks and plan.room < 2 * (answer_tokens + _BETWEEN_NOTES):
        raise UserError(
            f"two notes of {answer_tokens} tokens, a question of {question_tokens} and an answer of {answer_tokens} "
            f"exceed the window of {window}, so notes could not be merged; "
            f"lower --max-new-tokens or raise --window (at most {most})"
        )
    return plan
