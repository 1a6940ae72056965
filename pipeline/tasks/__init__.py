"""The registry of tasks: a task is one generator over a document, its options and its version."""

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.documents import Document
from pipeline.tasks.commands import Result, Steps
from pipeline.tasks.summarize import SummarizeOptions, summarize


@dataclass(frozen=True)
class Task:
    """`version` is part of a job's fingerprint: raise it when the task's commands or its use of the answers change."""

    name: str
    version: int
    run: Callable[[Document, SummarizeOptions], Steps[Result]]


TASKS = {task.name: task for task in (Task("summarize", 2, summarize),)}
