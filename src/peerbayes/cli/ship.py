"""The verb that ships a trained run: export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from peerbayes.choices import ExportCodebook, ExportFormat, ExportNoise
from peerbayes.cli.completing import run_folders
from peerbayes.cli.options import Json, Trust
from peerbayes.cli.output import say
from peerbayes.importing import trust_runs


def export(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run folder, whose peers predict as one, or a weights file of a run.", autocompletion=run_folders
        ),
    ],
    to: Annotated[
        ExportFormat,
        typer.Option(help="ONNX; a .pt2 file of torch.export; hub: weights, description and card."),
    ] = "onnx",
    out: Annotated[Path | None, typer.Option(help="The folder to make.", show_default="RUN-onnx, say")] = None,
    noise: Annotated[
        ExportNoise | None,
        typer.Option(
            help="Where draws come from: a seed and their number, which are inputs; noise that is an input; baked: "
            "the file holds them; none: one pass with the mean weights.",
            show_default="seed, or baked of members",
        ),
    ] = None,
    draws: Annotated[
        int | None, typer.Option(min=1, help="How many draws are baked, or advised.", show_default="the recipe's")
    ] = None,
    codebook: Annotated[
        ExportCodebook | None,
        typer.Option(
            help="Shared weights looked up (a small file) or plain.", show_default="plain if baked, else lookup"
        ),
    ] = None,
    opset: Annotated[int, typer.Option(help="Version of ONNX's operators.")] = 18,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Write a trained run as a program that runs without peerbayes, with its model card.

    The program returns probabilities, entropy and disagreement. It is compared with peerbayes before it is kept. The
    folder is a repository of the Hugging Face hub, and peerbayes.load opens it.
    """
    from peerbayes.exporting.export import export as exported

    trust_runs(trust)
    done = exported(
        run,
        to=to,
        out=out,
        noise=noise,
        draws=draws,
        codebook=codebook,
        opset=opset,
    )
    if as_json:
        say(json.dumps({"folder": str(done.folder), **done.about}, indent=1))
        return
    say(str(done.file or done.folder))
    if done.error is not None:
        checked = f"at most {done.error:.1e} from peerbayes's own predictions"
        passes = f"{done.about['passes']} pass{'es' * (done.about['passes'] != 1)}"
        say(f"{done.bytes:,} bytes, {passes} a prediction, {checked}; the card is {done.folder / 'README.md'}")
