"""Data sets as tensors, splits that are the same every time, and augmentation on the device."""

from peerbayes.choices import Placement
from peerbayes.data.dataset import Dataset, from_arrays, load, load_images, load_outside, load_texts, names
from peerbayes.data.datasets.cifar_c import load_corrupted
from peerbayes.data.datasets.sources import data_root
from peerbayes.data.loader import Feed, augmented_batch, feed
from peerbayes.data.splits import ArraySplit, FolderSplit, Split, batches, order
from peerbayes.data.transforms.augment import AUGMENTATIONS, augment
from peerbayes.data.transforms.corrupt import CORRUPTIONS, corrupt
from peerbayes.data.transforms.perturb import gaussian_step, guidance, pair, step_along
from peerbayes.data.vocabulary import TextOptions, Vocabulary
from peerbayes.networks.inputs import to_unit

__all__ = [
    "AUGMENTATIONS",
    "CORRUPTIONS",
    "ArraySplit",
    "Dataset",
    "Feed",
    "FolderSplit",
    "Placement",
    "Split",
    "TextOptions",
    "Vocabulary",
    "augment",
    "augmented_batch",
    "batches",
    "corrupt",
    "data_root",
    "feed",
    "from_arrays",
    "gaussian_step",
    "guidance",
    "load",
    "load_corrupted",
    "load_images",
    "load_outside",
    "load_texts",
    "names",
    "order",
    "pair",
    "step_along",
    "to_unit",
]
