"""The ``streamllm`` command: what the hardware can do, and how close the runtime comes to it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """Run language models bigger than the GPU by streaming their layers."""


@app.command()
def hardware(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:n]")] = "auto",
    disk: Annotated[
        Path | None, typer.Option(help="Folder on the disk to measure; default: the cache of converted models.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure memory, link and disk bandwidths and matmul rates of this machine."""
    from streamllm_core import hardware as machine
    from streamllm_core.model import resolve_device

    report = machine.measure(resolve_device(device), disk)
    typer.echo(json.dumps(report) if as_json else machine.table(report))
    for line in machine.not_measured(report):
        typer.echo(line, err=True)


@app.command()
def bench(
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 16,
    hidden_dim: Annotated[int, typer.Option(min=256, help="Hidden size, a multiple of 256.")] = 2048,
    seq_len: Annotated[list[int] | None, typer.Option(help="Tokens a pass; may be given several times.")] = None,
    model_shape: Annotated[str | None, typer.Option(help="qwen2.5-7b, llama3-8b or smollm2-135m.")] = None,
    window: Annotated[int, typer.Option(min=1, help="Recent tokens that attention sees.")] = 2048,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:n]")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Time streamed passes over random weights, one after the other and prefetched, against
    max(transfer, compute)."""
    from streamllm_core import bench as benchmark

    if model_shape is not None and model_shape not in benchmark.SHAPES:
        raise ValueError(f"unknown shape '{model_shape}'; known: {', '.join(benchmark.SHAPES)}")
    shape = benchmark.SHAPES[model_shape] if model_shape else benchmark.Shape.of_width(layers, hidden_dim)
    rows = list(benchmark.bench(shape, seq_len or [128], window=window, device=device, dtype=dtype))
    typer.echo(benchmark.as_json(rows) if as_json else benchmark.table(rows))


def main() -> None:
    """Entry point: a user's mistake ends in one line and exit code 3."""
    from streamllm_core.errors import StreamLLMError

    try:
        app()
    except (StreamLLMError, ValueError) as error:
        sys.stderr.write(f"streamllm: {error}\n")
        sys.exit(3)
