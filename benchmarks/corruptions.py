"""Compare the corruptions made here with the published ones, on the same images: mean absolute change by severity.

The published functions are read from a file that does not come with peerbayes: ``ImageNet-C/create_c/make_cifar_c.py``
of github.com/hendrycks/robustness (only its functions are used, the rest of the file is not run). Their photographs of
frost come with the package imagecorruptions. In an environment of its own, beside torch and peerbayes, with the library
MagickWand of ImageMagick installed:

    pip install "numpy<2" "scipy<1.12" scikit-image==0.20.0 "opencv-python-headless<4.10" Wand "pillow<11"
    pip install --no-deps imagecorruptions
    python benchmarks/corruptions.py make_cifar_c.py cifar100.npz --out results/corruptions-cifar100.json
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from peerbayes.data.transforms.corrupt import CORRUPTIONS, SEVERITIES, corrupt
from peerbayes.math.noise import Address

DETERMINISTIC = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression",
                 "gaussian_blur", "saturate")  # fmt: skip


def published_functions(path: Path) -> dict:
    """Return the functions of the published file, with what current libraries call otherwise given its old name."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if _is_definition(node)]
    space: dict = {}
    exec(compile(tree, str(path), "exec"), space)
    gaussian = space["gaussian"]
    space["gaussian"] = lambda x, sigma, multichannel=False, **rest: gaussian(
        x, sigma, channel_axis=-1 if multichannel else None, **rest
    )
    return space


def _is_definition(node: ast.stmt) -> bool:
    """Tell functions, classes, their signatures and imports from what makes the published arrays."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return "torch" not in ast.unparse(node)
    return isinstance(node, (ast.FunctionDef, ast.ClassDef)) or "argtypes" in ast.unparse(node)


def by_published(functions: dict, name: str, severity: int, images: np.ndarray) -> np.ndarray:
    """Return what the published function makes of each image, before bytes; impulse noise can not be seeded."""
    np.random.seed(severity)  # noqa: NPY002, the generator that those functions draw from
    return np.stack([np.asarray(functions[name](Image.fromarray(image), severity), np.float64) for image in images])


def by_ours(name: str, severity: int, images: np.ndarray) -> np.ndarray:
    batch = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    return corrupt(batch, name, severity, Address(0, "benchmark")).permute(0, 2, 3, 1).double().numpy()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("published", type=Path, help="make_cifar_c.py")
    parser.add_argument("images", type=Path, help="an .npz file with test_images (N, 32, 32, 3), uint8")
    parser.add_argument("--count", type=int, default=1000, help="so many of the images, evenly spread")
    parser.add_argument("--only", action="append", help="this corruption only; repeatable")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    functions = published_functions(args.published)
    every = np.load(args.images)["test_images"]
    images = every[np.arange(args.count) * (len(every) // args.count)]
    out = args.out and args.out.absolute()
    package = importlib.util.find_spec("imagecorruptions")
    os.chdir(Path(package.origin).parent / "frost")  # the published function opens its photographs there
    table = {}
    for name in args.only or CORRUPTIONS:
        row: dict[str, list[float]] = {"published": [], "ours": []}
        if name in DETERMINISTIC:
            row["difference"] = []
        for severity in range(1, SEVERITIES + 1):
            theirs, ours = (
                np.rint(by_published(functions, name, severity, images)).clip(0, 255),
                by_ours(name, severity, images),
            )
            row["published"].append(round(float(abs(theirs - images).mean()), 2))
            row["ours"].append(round(float(abs(ours - images).mean()), 2))
            if name in DETERMINISTIC:
                row["difference"].append(round(float(abs(theirs - ours).mean()), 2))
        table[name] = row
        print(f"{name:18}", *(f"{key} {values}" for key, values in row.items()), flush=True)
    if out:
        versions = ("numpy", "scipy", "scikit-image", "opencv-python-headless", "pillow", "Wand", "torch", "peerbayes")
        record = {
            "command": "python benchmarks/corruptions.py make_cifar_c.py cifar100.npz",
            "images": f"{args.count} test images of {args.images.stem}, evenly spread",
            "unit": "mean absolute change of a byte, severities 1 to 5; difference: between the two, without noise",
            "published": "github.com/hendrycks/robustness, ImageNet-C/create_c/make_cifar_c.py, rounded to bytes",
            "versions": {name: importlib.metadata.version(name) for name in versions},
            "mean_change": table,
        }
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
