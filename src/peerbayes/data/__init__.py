"""Data sets as tensors, splits that are the same every time, and augmentation on the device."""

from peerbayes.data.augmentation import AUGMENTATIONS, augment, to_unit
from peerbayes.data.feeding import Feed, Placement, feed
from peerbayes.data.loading import Dataset, load, load_images
from peerbayes.data.sources import data_root, names
from peerbayes.data.splits import ArraySplit, FolderSplit, Split, batches, order

__all__ = [
    "AUGMENTATIONS",
    "ArraySplit",
    "Dataset",
    "Feed",
    "FolderSplit",
    "Placement",
    "Split",
    "augment",
    "batches",
    "data_root",
    "feed",
    "load",
    "load_images",
    "names",
    "order",
    "to_unit",
]
