"""Data sets as tensors, splits that are the same every time, and augmentation on the device."""

from peerbayes.data.augmentation import AUGMENTATIONS, augment, to_unit
from peerbayes.data.cifar_c import load_corrupted
from peerbayes.data.corruptions import CORRUPTIONS, corrupt
from peerbayes.data.feeding import Feed, Placement, feed
from peerbayes.data.loading import Dataset, from_arrays, load, load_images, load_outside, load_texts, names
from peerbayes.data.perturbation import gaussian_step, guidance, pair, step_along
from peerbayes.data.sources import data_root
from peerbayes.data.splits import ArraySplit, FolderSplit, Split, batches, order
from peerbayes.data.text import TextOptions, Vocabulary

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
