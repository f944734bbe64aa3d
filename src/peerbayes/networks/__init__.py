"""Build networks: any `torch.nn.Module` from images in [0, 1], or token numbers, to logits."""

from peerbayes.networks import googlenet, mlp, projection_resnet, resnet, text, vgg, wide_resnet
from peerbayes.networks.features import capture, find_layer
from peerbayes.networks.inputs import Inputs, Normalize, Normalized, WordVectors
from peerbayes.networks.normalisation import normalised
from peerbayes.networks.pretrained import starting_point
from peerbayes.networks.registry import AUTO, build, for_inputs, names, network
from peerbayes.networks.text import SequenceClassifier

__all__ = [
    "AUTO",
    "Inputs",
    "Normalize",
    "Normalized",
    "SequenceClassifier",
    "WordVectors",
    "build",
    "capture",
    "find_layer",
    "for_inputs",
    "googlenet",
    "mlp",
    "names",
    "network",
    "normalised",
    "projection_resnet",
    "resnet",
    "starting_point",
    "text",
    "vgg",
    "wide_resnet",
]
