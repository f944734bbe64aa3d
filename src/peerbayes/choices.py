"""Choices that Python and the command line have in common, by name; importing them costs nothing."""

from typing import Literal

EngineName = Literal["eager", "compiled", "captured"]
Engine = Literal["auto", EngineName]
Precision = Literal["auto", "float32", "bfloat16"]
Placement = Literal["auto", "device", "stream"]
Sampler = Literal["grid", "tpe"]
Objective = Literal["nll", "accuracy", "ece"]  # figures of the validation split
SetMethod = Literal["lac", "aps", "raps"]  # of prediction sets
LoggerName = Literal["tensorboard", "mlflow", "wandb", "trackio"]
ExportFormat = Literal["onnx", "torch", "hub"]
ExportNoise = Literal["seed", "input", "baked", "none"]  # where an export's draws come from
ExportCodebook = Literal["lookup", "plain"]
