"""Verbs that ship a trained run: export and serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from peerbayes.choices import ExportCodebook, ExportFormat, ExportNoise
from peerbayes.cli.options import Device, Json, Trust, run_folders
from peerbayes.cli.output import say
from peerbayes.importing import trust_runs


def export(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run folder, whose peers predict as an ensemble, or a weights file of a run.",
            autocompletion=run_folders,
        ),
    ],
    to: Annotated[
        ExportFormat,
        typer.Option(help="ONNX; a .pt2 file of torch.export; hub: weights, config and card only."),
    ] = "onnx",
    out: Annotated[Path | None, typer.Option(help="Folder to write.", show_default="RUN-onnx, say")] = None,
    noise: Annotated[
        ExportNoise | None,
        typer.Option(
            help="Source of draws. seed: a seed and a number are inputs; input: noise is an input; baked: the file "
            "holds the draws; none: one pass with the mean weights.",
            show_default="seed, or baked for members",
        ),
    ] = None,
    draws: Annotated[
        int | None, typer.Option(min=1, help="Draws to bake, or to recommend.", show_default="the recipe's")
    ] = None,
    codebook: Annotated[
        ExportCodebook | None,
        typer.Option(
            help="Shared weights looked up (a small file) or plain.", show_default="plain if baked, else lookup"
        ),
    ] = None,
    opset: Annotated[int, typer.Option(help="Version of ONNX's operator set.")] = 18,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Export a trained run as a program that needs no peerbayes, with a model card.

    The program returns probabilities, entropy and disagreement, and is checked against peerbayes. The folder is a model
    repository for the Hugging Face hub, and peerbayes.load opens it.
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
        checked = f"at most {done.error:.1e} from the predictions of peerbayes"
        passes = f"{done.about['passes']} pass{'es' * (done.about['passes'] != 1)}"
        say(f"{done.bytes:,} bytes, {passes} a prediction, {checked}; the card is {done.folder / 'README.md'}")


def serve(
    run: Annotated[
        str,
        typer.Argument(
            help="A run folder or an export, whose peers predict as an ensemble, a weights file of a run, or "
            "OWNER/NAME on the Hugging Face hub."
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default admits this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.")] = 8000,
    draws: Annotated[
        int | None, typer.Option(min=1, help="Draws averaged.", show_default="the certificate's, or the recipe's")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds before a request times out.")] = 30.0,
    max_bytes: Annotated[int, typer.Option(help="Maximum bytes of a request.")] = 16 << 20,
    max_pixels: Annotated[int, typer.Option(help="Maximum pixels of an image.")] = 50_000_000,
    max_items: Annotated[int, typer.Option(help="Maximum images or texts of a request.")] = 32,
    max_requests: Annotated[int, typer.Option(help="Maximum pending requests; more get status 503.")] = 64,
    batch: Annotated[int, typer.Option(help="Maximum images or texts predicted together.")] = 64,
    wait: Annotated[float, typer.Option(help="Seconds that an input waits for others.")] = 0.002,
    device: Device = "auto",
    trust: Trust = False,
) -> None:
    """Serve a trained run as a web page and a JSON API with uncertainty, on this machine.

    The page takes an image or a text, and shows classes, uncertainty, the prediction set and whether it abstains, by
    the certificate of `peerbayes calibrate`. POST /predict is the API, /openapi.json describes it.
    """
    from peerbayes.serving.limits import Limits
    from peerbayes.serving.server import serve as served

    trust_runs(trust)
    given = {"seconds": timeout, "body": max_bytes, "pixels": max_pixels, "items": max_items, "requests": max_requests}
    limits = Limits.parse(given | {"batch": batch, "wait": wait}, "serve")

    def ready(title: str, address: str) -> None:
        say(f"{title} is served at {address} (Ctrl-C stops it)")

    served(run, host=host, port=port, draws=draws, limits=limits, device=device, ready=ready)
    say("stopped")
