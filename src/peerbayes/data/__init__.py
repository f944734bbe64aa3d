"""Data sets as tensors, splits that are the same every time, and augmentation on the device."""

from peerbayes.data.augmentation import AUGMENTATIONS, augment, to_unit
from peerbayes.data.feeding import Feed, Placement, feed
from peerbayes.data.loading import Dataset, load, load_images, load_texts, names
from peerbayes.data.sources import data_root
from peerbayes.data.splits import ArraySplit, FolderSplit, Split, batches, order
from peerbayes.data.text import TextOptions, Vocabulary

__all__ = [
    "AUGMENTATIONS",
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
    "data_root",
    "feed",
    "load",
    "load_images",
    "load_texts",
    "names",
    "order",
    "to_unit",
]
