"""A run's configuration, frozen once at the edge, and what of it the results depend on."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pipeline.errors import UserError
from pipeline.inputs import InputFile, Inputs
from pipeline.tasks import Task
from pipeline.tasks.summarize import INSTRUCTION, NOTE_PROMPT, SummarizeOptions
from pipeline.windows import WindowPlan

DEFAULT_MODEL = "smollm2"
SCHEMA_VERSION = 1
JOURNAL_FORMAT = 1
SMALL_MODEL = 1_000_000_000  # parameters; below, written summaries cannot be trusted


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and where and how it runs; the meaning is that of `AutoModel.from_pretrained`."""

    name: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    vram: str | None = None
    ram: str | None = None
    quantize: str | None = None
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    resident_layers: int | None = None
    streams: int | None = None
    pass_tokens: int | None = None
    draft_tokens: int | None = None
    draft_model: str | None = None


@dataclass(frozen=True)
class InputConfig:
    """What is read."""

    paths: tuple[str, ...]
    format: str = "auto"
    text_field: str = "text"
    id_field: str | None = None
    keep: tuple[str, ...] = ()
    limit: int | None = None


@dataclass(frozen=True)
class SummaryConfig:
    """What is asked of the model; None takes the default, which may depend on the model."""

    style: str = "auto"
    prompt: str | None = None
    note_prompt: str | None = None
    notes: str = "top"
    max_new_tokens: int | None = None
    segment_tokens: int | None = None
    window: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    @property
    def instruction(self) -> str:
        return self.prompt or INSTRUCTION

    @property
    def note_question(self) -> str:
        return self.note_prompt or NOTE_PROMPT

    def resolved_style(self, parameters: int) -> str:
        """`auto` means highlights for small models."""
        if self.style != "auto":
            return self.style
        return "highlights" if parameters < SMALL_MODEL else "notes"


@dataclass(frozen=True)
class ErrorLimit:
    """How many rows may fail: a number, or a share of all rows."""

    count: int | None = None
    share: float = 0.05

    @classmethod
    def parse(cls, text: str) -> "ErrorLimit":
        """`12` or `5%`. Raises UserError."""
        match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)%", text.strip())
        if match is None or (match[2] and float(match[2]) > 100):
            raise UserError(f"--max-errors {text}: give a number of rows, or a share such as 5%")
        return cls(int(match[1])) if match[1] else cls(None, float(match[2]) / 100)

    def exceeded(self, errors: int, rows: int) -> bool:
        return errors > (self.share * rows if self.count is None else self.count)


@dataclass(frozen=True)
class JobConfig:
    """How the job is kept."""

    output: str
    restart: bool = False
    keep_parts: bool = False
    max_errors: ErrorLimit = ErrorLimit()
    grace: float = 20.0


@dataclass(frozen=True)
class RunConfig:
    """Everything that `streamllm-batch summarize` was told."""

    task: Task
    model: ModelConfig
    inputs: InputConfig
    summary: SummaryConfig
    job: JobConfig

    @property
    def model_name(self) -> str:
        return self.model.name or DEFAULT_MODEL

    def request(self, files: Sequence[InputFile]) -> dict[str, Any]:
        """The part of the fingerprint that is known before a model is loaded."""
        wanted = self.inputs
        return {
            "task": {"name": self.task.name, "version": self.task.version},
            "schema_version": SCHEMA_VERSION,
            "journal_format": JOURNAL_FORMAT,
            "model": {
                "name": self.model_name,
                "revision": self.model.revision,
                "dtype": self.model.dtype,
                "quantize": self.model.quantize,
                "kv_dtype": self.model.kv_dtype,
            },
            "fields": {
                "text": wanted.text_field,
                "id": wanted.id_field,
                "keep": list(wanted.keep),
                "limit": wanted.limit,
            },
            "summary": asdict(self.summary),
            "inputs": [_identity(file) for file in files],
        }

    def resolved(self, model: Any, style: str, plan: WindowPlan) -> dict[str, Any]:
        """The part that only the model can tell: its files, and what the defaults came to for it."""
        return {
            "model_files": model.fingerprint,
            "dtype": str(model.dtype).removeprefix("torch."),
            "style": style,
            "instruction": self.summary.instruction,
            "note_prompt": self.summary.note_question,
            "window": {**asdict(plan), "room": plan.room, "group": plan.group},
        }

    def options(self, style: str, plan: WindowPlan) -> SummarizeOptions:
        summary = self.summary
        return SummarizeOptions(
            style=style,
            instruction=summary.instruction,
            note_prompt=summary.note_question,
            notes=summary.notes,
            segment_tokens=plan.segment_tokens,
            room=plan.room,
            group=plan.group,
        )


def _identity(file: InputFile) -> dict[str, Any]:
    fields = asdict(file)
    del fields["index"]
    return fields


def pinned_files(pinned: Sequence[Mapping[str, Any]], found: Inputs) -> tuple[tuple[InputFile, ...], list[str]]:
    """The files that a job was begun with, as they are now and in their old order; and the paths that are new.

    A file that is gone is left out, so that the job's fingerprint tells.
    """
    now = {file.path: file for file in found.files}
    old = [file["path"] for file in pinned]
    files = [replace(now[path], index=index) for index, path in enumerate(old) if path in now]
    return tuple(files), [path for path in now if path not in set(old)]
