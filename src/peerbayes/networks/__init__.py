"""Networks: any `torch.nn.Module` from images in [0, 1] to logits."""

from peerbayes.networks import mlp, resnet
from peerbayes.networks.features import capture, find_layer
from peerbayes.networks.registry import Inputs, Normalize, Normalized, build, names, network

__all__ = [
    "Inputs",
    "Normalize",
    "Normalized",
    "build",
    "capture",
    "find_layer",
    "mlp",
    "names",
    "network",
    "resnet",
]
