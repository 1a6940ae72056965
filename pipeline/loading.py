"""The model made ready for a task: window planned, engine and runner built. Imports torch and transformers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config import ModelConfig, RunConfig
from pipeline.errors import UserError
from pipeline.prompts import Prompter
from pipeline.records import finished_record, unread_record
from pipeline.report import Reporter
from pipeline.rows import Row
from pipeline.runner import Runner
from pipeline.taskrun import Asking, Finished
from pipeline.tasks.summarize import SummarizeOptions, merge_instruction
from pipeline.windows import ANSWER_TOKENS, SEGMENT_TOKENS, WINDOW, WindowPlan, plan_window
from streamllm_core import AutoModel, Engine, EngineConfig, ModelDrafter, StreamingModel
from streamllm_core.counters import counters
from streamllm_core.drafting import DEFAULT_DRAFTS
from streamllm_core.memory.limits import parse_bytes

PROMPT_TOKENS = 128  # what prompts are taken to need until they are measured


@dataclass(frozen=True)
class Loaded:
    """What a run works with."""

    model: StreamingModel
    engine: Engine
    runner: Runner
    options: SummarizeOptions
    resolved: dict[str, Any]
    encode: Callable[[str], list[int]]

    @property
    def tokens(self) -> int:
        """Read and generated so far."""
        return self.engine.tokens_read + self.engine.tokens_generated

    def counters(self) -> dict[str, Any]:
        """What the engine has done, for the run's report."""
        return counters(self.engine)

    def unread_record(self, row: Row) -> dict[str, Any]:
        return unread_record(row, self.model.name)

    def finished_record(self, finished: Finished) -> dict[str, Any]:
        return finished_record(finished, self.model.name)


def load(config: RunConfig, reporter: Reporter) -> Loaded:
    """Load the model and plan its window. Raises UserError and StreamLLMError before any work begins."""
    wanted, summary = config.model, config.summary
    try:
        drafter = _drafter(wanted)
        model = AutoModel.from_pretrained(
            config.model_name,
            device=wanted.device,
            dtype=wanted.dtype,
            resident_layers="auto" if wanted.resident_layers is None else wanted.resident_layers,
            vram=_left(wanted.vram, drafter),
            ram=wanted.ram,
            quantize=wanted.quantize,
            expected=_expected(config),
            revision=wanted.revision,
        )
    except ValueError as error:  # its word for a device, dtype or budget that cannot be
        raise UserError(str(error)) from error
    for note in model.notes:
        reporter.note(note)
    prompter = Prompter(model.tokenizer, pins=model.pins)
    if not model.pins:
        reporter.note(
            f"{config.model_name} has no layer that can keep a pinned prefix: each question repeats the instruction"
        )
    style = summary.resolved_style(model.parameter_count)
    asks = style == "notes"
    if not asks:
        _note_unused(config, reporter)
    plan = _plan(config, model, prompter, asks)
    options = config.options(style, plan)
    streams = wanted.streams if wanted.streams is None or not asks else max(2, wanted.streams)
    engine = model.engine(
        replace(
            _expected(config),
            window=plan.window,
            sinks=plan.sinks,
            excursion=plan.excursion,
            streams=streams,
            draft_tokens=DEFAULT_DRAFTS if drafter and wanted.draft_tokens is None else wanted.draft_tokens,
            read_tokens=plan.segment_tokens,
            answer_tokens=plan.answer_tokens if asks else 1,
        )
    )
    if drafter is not None:
        drafter.attach(engine)
    if asks and engine.streams < 2:
        raise UserError(
            "the memory budget holds one document only, and notes need a second stream; lower --window or raise --vram"
        )
    asking = Asking(plan.answer_tokens, plan.room, summary.temperature, summary.top_p, summary.seed)
    runner = Runner(engine, prompter, prompter.stop | model.stop_tokens, asking, side_stream=asks)

    def encode(text: str) -> list[int]:
        return list(prompter.data(text).ids)

    return Loaded(model, engine, runner, options, config.resolved(model, style, plan), encode)


def _expected(config: RunConfig) -> EngineConfig:
    """The engine as far as it is known before the model is: its tokenizer measures the prompts."""
    wanted, summary = config.model, config.summary
    answer = summary.max_new_tokens or ANSWER_TOKENS
    return EngineConfig(
        window=summary.window or WINDOW,
        sinks=PROMPT_TOKENS,
        excursion=PROMPT_TOKENS + answer,
        streams=wanted.streams,
        pass_tokens=wanted.pass_tokens,
        kv_dtype=wanted.kv_dtype,
        read_tokens=summary.segment_tokens or SEGMENT_TOKENS,
        answer_tokens=answer,
    )


def _drafter(wanted: ModelConfig) -> ModelDrafter | None:
    """The draft model comes first: what it takes is not free for the other."""
    if wanted.draft_model is None:
        return None
    if wanted.draft_tokens == 0:
        raise UserError("--draft-model guesses tokens, and --draft-tokens 0 wants none; leave one of them out")
    small = AutoModel.from_pretrained(wanted.draft_model, device=wanted.device, dtype=wanted.dtype, vram=wanted.vram)
    return ModelDrafter(small, wanted.streams)


def _left(vram: str | None, drafter: ModelDrafter | None) -> str | int | None:
    """The budget less what the draft model takes; without a budget what is free is measured."""
    return vram if vram is None or drafter is None else max(0, parse_bytes(vram) - drafter.nbytes)


def _plan(config: RunConfig, model: StreamingModel, prompter: Prompter, asks: bool) -> WindowPlan:
    summary = config.summary
    merging = merge_instruction(summary.instruction)
    pins = [prompter.pin(text) for text in ((summary.instruction, merging) if asks else (summary.instruction,))]
    questions = [prompter.question(text, merging) for text in (summary.instruction, summary.note_question)]
    return plan_window(
        model.trained_context,
        sinks=max(map(len, pins)),
        question_tokens=max(map(len, questions)),
        asks=asks,
        window=summary.window,
        segment_tokens=summary.segment_tokens,
        answer_tokens=summary.max_new_tokens,
    )


def _note_unused(config: RunConfig, reporter: Reporter) -> None:
    """Say which of the options given have no effect on highlights, which are chosen and not written."""
    summary = config.summary
    given = {
        "--note-prompt": summary.note_prompt is not None,
        "--max-new-tokens": summary.max_new_tokens is not None,
        "--temperature": summary.temperature != 0,
        "--draft-tokens": config.model.draft_tokens is not None,
        "--draft-model": config.model.draft_model is not None,
    }
    unused = [option for option, is_given in given.items() if is_given]
    if unused:
        reporter.note(
            f"{', '.join(unused)}: without effect on highlights, which are sentences of the text; --style notes writes"
        )
