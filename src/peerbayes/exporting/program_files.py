"""Programs as files, ONNX and torch.export's, and running them."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from peerbayes.errors import InputError, reason
from peerbayes.exporting.program import OUTPUTS, Program
from peerbayes.posteriors import storage

OPSET = 18  # the first one with bitwise operators, which noise is made by
ABOUT = "peerbayes"  # under which a file says what it is
MAX_ONNX_BYTES = (1 << 31) - (1 << 24)  # bytes that one ONNX file can hold, with room for its graph
FOLDED = 256  # numbers of a constant that may be worked out beforehand: a larger one would be stored
DYNAMIC = {
    "images": "batch",
    "tokens": "batch",
    "noise": "draws",
}  # inputs with a first axis of any length, and its name


def _recurrent(program: Program) -> str:
    """Return why a recurrent layer can't be drawn in a loop, for the first of a program; '' where there is none."""
    for name, module in program.named_modules():
        if isinstance(module, nn.RNNBase):
            layer = f"'{name.rpartition('network.')[2]}' ({type(module).__name__})"
            return f"layer {layer} keeps a list of its weights, which the loop can't replace"
    return ""


def traced(program: Program, example: Mapping[str, Tensor]) -> ExportedProgram:
    """Return a program as a graph for batches of any size.

    Args:
        program: the module.
        example: its inputs by name, in order.
    """
    shapes = tuple({0: Dim.DYNAMIC} if name in DYNAMIC else None for name in example)
    try:
        with _quiet(), torch.enable_grad():  # where gradients are off, posteriors write into buffers
            exported = torch.export.export(program.eval(), tuple(example.values()), dynamic_shapes=shapes)
    except Exception as error:  # a network may do anything
        if type(error).__name__ == "UncapturedHigherOrderOpError":
            raise InputError(
                f"the network can't be run in a loop over draws: {_recurrent(program) or _said(error)}; --noise none "
                "(noise='none') exports its mean weights, one pass without disagreement"
            ) from error
        raise InputError(
            f"the network can't be traced by torch.export for batches of any size: {_said(error)}"
        ) from error
    _prune(exported)
    return exported


def _prune(exported: ExportedProgram) -> None:
    """Drop what only training needs, and where each operation came from."""
    nodes = {node.name: node for node in exported.graph.nodes}
    kept = []
    for spec in exported.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT or node.users:
            kept.append(spec)
            continue
        exported.graph.erase_node(node)
        exported.state_dict.pop(str(spec.target), None)
        exported.constants.pop(str(spec.target), None)
    exported.graph_signature.input_specs[:] = kept
    for module in exported.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node"):
                    node.meta.pop(key, None)
            module.recompile()


def write_torch(path: Path, graph: ExportedProgram, about: Mapping[str, Any]) -> None:
    """Write a graph as a file of `torch.export`, ``.pt2``; `torch.export.load` reads it.

    Args:
        path: the file.
        graph: the graph.
        about: what is said of it, JSON-ready; ``extra_files`` of `torch.export.load` has it under `ABOUT`.
    """
    with _quiet():
        torch.export.save(graph, path, extra_files={ABOUT: json.dumps(about)})


def write_onnx(path: Path, graph: ExportedProgram, names: Sequence[str], about: Mapping[str, Any], opset: int) -> None:
    """Write a graph as one ONNX file.

    Args:
        path: the file.
        graph: the graph.
        names: of its inputs.
        about: what is said of it, JSON-ready, in its metadata.
        opset: version of ONNX's operators.
    """
    onnx, onnxscript, _ = needed()
    large = sum(tensor.nbytes for tensor in graph.state_dict.values())
    if large > MAX_ONNX_BYTES:
        size = f"{large / 1e9:.1f}"
        raise InputError(f"an ONNX file holds 2 GB, this one would have {size}: bake fewer draws, or take noise 'seed'")
    try:
        with _quiet():
            made = torch.onnx.export(
                graph, dynamo=True, opset_version=opset, optimize=False, verbose=False,
                input_names=list(names), output_names=list(OUTPUTS),
            )  # fmt: skip
            assert made is not None
            onnxscript.optimizer.optimize(made.model, input_size_limit=4 * FOLDED, output_size_limit=FOLDED)
            model = made.model_proto
    except Exception as error:
        raise InputError(f"the network can't be written as ONNX (opset {opset}): {_said(error)}") from error
    _strip(model.graph)
    _name_axes(model.graph)
    onnx.helper.set_model_props(model, metadata(about))
    model.producer_name, model.producer_version = "peerbayes", str(about["peerbayes"])
    onnx.checker.check_model(model)
    storage.write_bytes(path, model.SerializeToString())


def metadata(about: Mapping[str, Any]) -> dict[str, str]:
    """Return what is said of a program as texts by name: the whole as JSON under `ABOUT`, and its parts."""
    return {ABOUT: json.dumps(about)} | {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items() if key != ABOUT
    }


def run_onnx(path: Path, feeds: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the outputs of an ONNX file, run by ONNX Runtime.

    Args:
        path: the file.
        feeds: inputs by name.
    """
    _, _, runtime = needed()
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return [torch.from_numpy(array) for array in session.run(None, {name: t.numpy() for name, t in feeds.items()})]
    except Exception as error:  # of the runtime's own kinds
        raise InputError(f"the program can't be run by ONNX Runtime: {_said(error)}") from error


def run_torch(path: Path, feeds: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the outputs of a file of `torch.export`.

    Args:
        path: the file.
        feeds: inputs by name, in order.
    """
    with _quiet(), torch.no_grad():
        return list(torch.export.load(path).module()(*feeds.values()))


def needed() -> tuple[Any, Any, Any]:
    """Return onnx, onnxscript and onnxruntime, or say how to install them."""
    try:
        import onnx
        import onnxruntime
        import onnxscript
    except ImportError as error:
        raise InputError(f"ONNX needs {error.name}, which is not installed: pip install 'peerbayes[export]'") from None
    return onnx, onnxscript, onnxruntime


def _strip(graph: Any) -> None:
    """Drop an ONNX graph's notes on where nodes came from, and weights that no node uses."""
    used = _used(graph)
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    for part in (graph, *graph.node, *graph.initializer, *graph.input, *graph.output):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    graph.ClearField("value_info")
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _strip(attribute.g)


def _used(graph: Any) -> set[str]:
    names = {output.name for output in graph.output}
    for node in graph.node:
        names.update(node.input)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                names |= _used(attribute.g)
    return names


def _name_axes(graph: Any) -> None:
    """Name the first axes of an ONNX graph's inputs and outputs: batch and draws."""
    first = [value.type.tensor_type.shape.dim for value in graph.input]
    names = {dims[0].dim_param: DYNAMIC.get(value.name, "batch") for value, dims in zip(graph.input, first) if dims}
    for value in (*graph.input, *graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param:
                axis.dim_param = names.get(axis.dim_param, axis.dim_param)


def _said(error: BaseException) -> str:
    """Return why an exporter gave up, in a line: the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines[1:] and lines[0].endswith(":") else reason(error)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence exporters, which print and warn of what their users can't change."""
    loggers = [logging.getLogger(name) for name in ("torch", "onnxscript", "onnx_ir", "torch.onnx")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
