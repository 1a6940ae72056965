"""The ``streamllm`` command: what the hardware can do, and how close the runtime comes to it."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from streamllm_core.kv_storage import KVDtype

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
    from streamllm_core.devices import resolve_device

    report = machine.measure(resolve_device(device), disk)
    typer.echo(json.dumps(report) if as_json else machine.table(report))
    for line in machine.not_measured(report):
        typer.echo(line, err=True)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Model folder, .gguf file, or hub id (only its headers are fetched).")],
    vram: Annotated[str | None, typer.Option(help="Memory budget, for example 4GB. Default: what is free.")] = None,
    quantize: Annotated[str | None, typer.Option(help="int8 or int4: plan for packed weights.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="auto, int8 or fp8: how keys and values are kept.")] = "auto",
    window: Annotated[int, typer.Option(min=1, help="Recent tokens that attention sees.")] = 2048,
    sinks: Annotated[int, typer.Option(min=0, help="Longest pinned prompt, in tokens.")] = 64,
    documents: Annotated[int | None, typer.Option(min=1, help="Most texts in flight.")] = None,
    document_tokens: Annotated[int, typer.Option(min=1, help="What is read between two answers.")] = 1000,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 256,
    resident_layers: Annotated[int | None, typer.Option(min=0, help="Layers that stay. Default: the best.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:n]; cuda can be planned for where there is none")] = (
        "auto"
    ),
    revision: Annotated[str | None, typer.Option(help="Hub revision.")] = None,
    bus_gb_s: Annotated[float | None, typer.Option(min=0.1, help="Host-to-device GB/s, in place of a probe.")] = None,
    matmul_tflops: Annotated[float | None, typer.Option(min=0.001, help="TFLOP/s, in place of a probe.")] = None,
    memory_gb_s: Annotated[float | None, typer.Option(min=0.1, help="Device memory GB/s, in place of a probe.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show where every byte of a budget would go and what speed to expect, without loading the model."""
    from streamllm_core.engine_config import EngineConfig
    from streamllm_core.planning import ASSUMED, plan_model, with_rates

    config = EngineConfig(
        window,
        sinks,
        excursion=answer_tokens,
        streams=documents,
        kv_dtype=cast("KVDtype", kv_dtype),
        read_tokens=document_tokens,
        answer_tokens=answer_tokens,
    )
    found, assumed = plan_model(
        model,
        config,
        device=device,
        dtype=dtype,
        quantize=quantize,
        vram=vram,
        resident=resident_layers,
        revision=revision,
        rates=with_rates(bus_gb_s, matmul_tflops, memory_gb_s),
    )
    typer.echo(json.dumps(found.as_dict()) if as_json else found.table())
    if assumed and not as_json:
        typer.echo(
            f"No card here: {ASSUMED.host_to_device / 1e9:.0f} GB/s over the bus, {ASSUMED.matmul / 1e12:.0f} TFLOP/s "
            f"and {ASSUMED.memory / 1e9:.0f} GB/s of memory are assumed where no option says otherwise.",
            err=True,
        )


@app.command()
def bench(
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 16,
    hidden_dim: Annotated[int, typer.Option(min=256, help="Hidden size, a multiple of 256.")] = 2048,
    seq_len: Annotated[list[int] | None, typer.Option(help="Tokens a pass; may be given several times.")] = None,
    model_shape: Annotated[str | None, typer.Option(help="A known shape, such as qwen2.5-7b or llama3-70b.")] = None,
    quantize: Annotated[str | None, typer.Option(help="int8 or int4: weights travel packed.")] = None,
    resident_layers: Annotated[
        int | None, typer.Option(min=0, help="Layers that stay. Default: none for passes, the plan's for a job.")
    ] = None,
    vram: Annotated[
        str | None, typer.Option(help="Memory budget, for example 4GB: put the plan for it to the test.")
    ] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="Run a whole job of so many documents.")] = None,
    document_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each document.")] = 16_384,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated for each document.")] = 128,
    kv_dtype: Annotated[str, typer.Option(help="auto, int8 or fp8: how a job keeps keys and values.")] = "auto",
    window: Annotated[int, typer.Option(min=1, help="Recent tokens that attention sees.")] = 2048,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:n]")] = "auto",
    plot: Annotated[Path | None, typer.Option(help="Also draw the result into this file (.png, .svg, .pdf).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time passes over random weights, one after the other and prefetched, against max(transfer, compute); with --vram
    the fullest passes of a plan against its prediction; with --documents a whole job against its roofline."""
    from streamllm_core.bench import job, passes, planned, plots
    from streamllm_core.bench.shapes import SHAPES, Shape, random_model
    from streamllm_core.memory.limits import UNLIMITED

    if model_shape is not None and model_shape not in SHAPES:
        raise ValueError(f"unknown shape '{model_shape}'; known: {', '.join(SHAPES)}")
    if plot is not None:
        plots.require()
    shape = SHAPES[model_shape] if model_shape else Shape.of_width(layers, hidden_dim)
    load = partial(random_model, shape, device=device, dtype=dtype, quantize=quantize)
    if documents is not None:
        work = job.Work(documents, document_tokens, answer_tokens)
        config = work.config(window, cast("KVDtype", kv_dtype))
        with load(vram=vram, resident=resident_layers, expected=config) as model:
            result = job.bench_job(model, shape, config, work)
        typer.echo(job.as_json(result, work) if as_json else job.table(result, work))
        draw = partial(plots.job, result)
    elif vram is not None:
        config = planned.config(window, cast("KVDtype", kv_dtype))
        with load(vram=vram, resident=resident_layers, expected=config) as model:
            check = planned.check(model, config)
        typer.echo(planned.as_json(check) if as_json else planned.table(check))
        draw = partial(plots.planned, check)
    else:
        with load(vram=UNLIMITED, resident=resident_layers or 0) as model:
            rows = list(passes.bench(model, shape, seq_len or [128], window=window))
        typer.echo(passes.as_json(rows) if as_json else passes.table(rows))
        draw = partial(plots.passes, rows)
    if plot is not None:
        draw(plot)
    if model.device.type == "cpu" and not as_json:
        typer.echo("On the CPU: page-locked transfers and the card's memory were not measured.", err=True)


def main() -> None:
    """Entry point: a user's mistake ends in one line and exit code 3."""
    from streamllm_core.errors import StreamLLMError

    try:
        app()
    except (StreamLLMError, ValueError) as error:
        sys.stderr.write(f"streamllm: {error}\n")
        sys.exit(3)
