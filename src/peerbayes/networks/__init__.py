"""Build networks: any `torch.nn.Module` from images in [0, 1], or token numbers, to logits."""

from peerbayes.networks import googlenet, mlp, projection_resnet, resnet, text, vgg, wide_resnet
from peerbayes.networks.inputs import Inputs, Normalize, Normalized, WordVectors
from peerbayes.networks.normalisation import normalised
from peerbayes.networks.registry import AUTO, build, for_inputs, names, network
from peerbayes.networks.running import capture, find_layer
from peerbayes.networks.text import SequenceClassifier
from peerbayes.networks.weights_files import starting_point

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
