"""`streamllm-batch`: parses options, runs the job, and turns every error into a message and an exit code."""

import logging
import os
import re
import sys
from collections.abc import Callable
from enum import StrEnum
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.errors import UserError
from pipeline.report import Reporter, print_summary
from pipeline.stopping import GraceOver, StopSwitch

if TYPE_CHECKING:
    from pipeline.config import RunConfig

EXIT_TEMPORARY = 75

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Offline jobs over long documents with a language model: resumable, in constant memory.",
)


class Style(StrEnum):
    auto = "auto"
    notes = "notes"
    highlights = "highlights"


class Notes(StrEnum):
    none = "none"
    top = "top"
    all = "all"


class InputFormat(StrEnum):
    auto = "auto"
    jsonl = "jsonl"
    parquet = "parquet"
    text = "text"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Quantize(StrEnum):
    int8 = "int8"
    int4 = "int4"


class KVDtype(StrEnum):
    auto = "auto"
    int8 = "int8"
    fp8 = "fp8"


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"streamllm-batch {version('streamllm-batch')}")
        raise typer.Exit


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise typer.BadParameter(f"{name} is not auto, cpu, cuda or cuda:N")
    return name


@app.callback()
def _main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


_MODEL, _INPUT, _SUMMARY, _JOB = "Model", "Input", "Summary", "Job"


@app.command()
def summarize(
    inputs: Annotated[
        list[str],
        typer.Argument(
            help="Files, folders, patterns or URLs: JSONL, Parquet, text, compressed too; - is JSONL on stdin."
        ),
    ],
    output: Annotated[str, typer.Argument(help="out.jsonl, out.jsonl.gz, out.jsonl.zst or out.parquet.")],
    model: Annotated[
        str | None, typer.Option(help="Model folder, .gguf file, or hub id. Default: a small demo model.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision: branch, tag or commit.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number type to compute in.")] = Dtype.auto,
    device: Annotated[str, typer.Option(callback=_device, help="auto, cpu, cuda or cuda:N.")] = "auto",
    vram: Annotated[str | None, typer.Option(help="Memory budget, for example 4GB. Default: what is free.")] = None,
    ram: Annotated[
        str | None, typer.Option(help="RAM for streamed layers, for example 16GB; the others come from disk.")
    ] = None,
    quantize: Annotated[
        Quantize | None, typer.Option(help="Pack the weights, once: a half or a quarter of the bytes a pass.")
    ] = None,
    kv_dtype: Annotated[
        KVDtype, typer.Option(help="How documents' keys and values are kept: as computed, or in one byte each.")
    ] = KVDtype.auto,
    resident_layers: Annotated[
        int | None,
        typer.Option(min=0, help="Layers kept on the device; the others are streamed. Default: all that fit."),
    ] = None,
    streams: Annotated[int | None, typer.Option(min=1, help="Most documents and questions in work at once.")] = None,
    pass_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens in one pass over the weights.")] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens guessed ahead and confirmed in one pass. Default: 8 if layers are streamed."),
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="Small model with the same tokenizer to guess with. Default: look in the text.")
    ] = None,
    input_format: Annotated[
        InputFormat, typer.Option(help="How to read files whose name does not say.")
    ] = InputFormat.auto,
    text_field: Annotated[str, typer.Option(help="Column with the text; a.b for a nested one.")] = "text",
    id_field: Annotated[str | None, typer.Option(help="Column echoed as id.")] = None,
    keep: Annotated[str | None, typer.Option(help="Columns to keep under fields: name,name.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after so many rows.")] = None,
    style: Annotated[
        Style,
        typer.Option(
            help="notes: written by the model; highlights: sentences of the text; auto: highlights below 1B parameters."
        ),
    ] = Style.auto,
    prompt: Annotated[str | None, typer.Option(help="What summary is wanted.")] = None,
    note_prompt: Annotated[str | None, typer.Option(help="What a note on one part of the text is to say.")] = None,
    notes: Annotated[
        Notes, typer.Option(help="Which notes go into the record: none, the last level, or all.")
    ] = Notes.top,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer in tokens. [default: 256]")] = None,
    segment_tokens: Annotated[
        int | None, typer.Option(min=16, help="Tokens read between two questions. [default: 1000]")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Tokens that stay visible beside the pinned ones. [default: 2048]")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Nucleus sampling.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw the results of an earlier run of this job away.")
    ] = False,
    keep_parts: Annotated[
        bool, typer.Option("--keep-parts", help="Keep the committed parts beside the output.")
    ] = False,
    max_errors: Annotated[str, typer.Option(metavar="N|P%", help="Rows in error before the exit code is 4.")] = "5%",
    skip_code: Annotated[
        int | None, typer.Option(min=0, max=255, help="Exit code when another run holds the job, in place of 75.")
    ] = None,
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds to finish documents in work after a signal.")] = 20.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only errors on stderr.")] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="stderr as lines of JSON.")] = False,
) -> None:
    """Summarize every document of INPUTS into one record each in OUTPUT.

    The same command again resumes a job that was stopped or killed. The last line on stdout is a summary in JSON.
    Exit codes: 0 done, 2 usage, 3 input or configuration, 4 too many rows in error, 75 try again later, 130/143
    stopped.
    """
    # Here and below, what takes long to import waits until it is needed: --help answers at once.
    from pipeline.config import ErrorLimit, InputConfig, JobConfig, ModelConfig, RunConfig, SummaryConfig
    from pipeline.tasks import TASKS

    reporter = Reporter(quiet=quiet, log_json=log_json)

    def configure() -> "RunConfig":
        return RunConfig(
            task=TASKS["summarize"],
            model=ModelConfig(
                model,
                revision,
                dtype.value,
                device,
                vram,
                ram,
                None if quantize is None else quantize.value,
                kv_dtype.value,
                resident_layers,
                streams,
                pass_tokens,
                draft_tokens,
                draft_model,
            ),
            inputs=InputConfig(tuple(inputs), input_format.value, text_field, id_field, _names(keep), limit),
            summary=SummaryConfig(
                style.value,
                prompt,
                note_prompt,
                notes.value,
                max_new_tokens,
                segment_tokens,
                window,
                temperature,
                top_p,
                seed,
            ),
            job=JobConfig(output, restart, keep_parts, ErrorLimit.parse(max_errors), grace),
        )

    raise typer.Exit(_run(configure, reporter, grace, skip_code))


def _names(listed: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip()) if listed else ()


def _run(configure: Callable[[], "RunConfig"], reporter: Reporter, grace: float, skip_code: int | None) -> int:
    """The exit code. Whatever happens, a JSON summary is the last thing on stdout."""
    from jobs.errors import JobError, LockedError
    from pipeline.batch import run_job

    _silence_libraries()
    stop = StopSwitch(grace)
    summary: dict[str, Any]
    try:
        with stop:
            summary = run_job(configure(), reporter, stop)
    except GraceOver:
        summary = {"status": "stopped", "exit_code": stop.exit_code}
    except LockedError as error:
        summary = _failed(reporter, error, error.exit_code if skip_code is None else skip_code)
    except (UserError, JobError) as error:
        summary = _failed(reporter, error, error.exit_code)
    except OSError as error:
        summary = _failed(reporter, error, EXIT_TEMPORARY)
    except Exception as error:
        from streamllm_core import StreamLLMError

        if not isinstance(error, StreamLLMError):
            print_summary({"status": "failed", "error": f"{type(error).__name__}: {error}", "exit_code": 1})
            raise
        summary = _failed(reporter, error, UserError.exit_code)
    print_summary(summary)
    return int(summary["exit_code"])


def _failed(reporter: Reporter, error: Exception, code: int) -> dict[str, Any]:
    reporter.error(f"streamllm-batch: {error}")
    return {"status": "failed", "error": str(error), "exit_code": code}


def _silence_libraries() -> None:
    """The libraries below tell their own story on stderr, where ours is read."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "0" if sys.stderr.isatty() else "1")
    logging.captureWarnings(True)
    logging.getLogger("streamllm_core").addHandler(logging.NullHandler())  # what users need to know, the reporter says


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
