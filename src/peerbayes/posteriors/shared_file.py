"""The small file of shared weights: what makes a network first, then what makes it uncertain.

Tensors, in the order in which they lie in the file:

network/..., rest/...   all that is not shared
means/component         m of the components, float32 (K,)
means/outlier           means of the outliers, float32 (O,), in the order of the weights
means/index             for every weight its component, K for an outlier, K + 1 for a blended weight; entropy-coded
means/blend_component   the two components of every blended weight; entropy-coded
means/blend_weight      the share of the first of them, in 255ths, uint8 (E,)
scales/component        s of the components, float32 (K,)
scales/cholesky         float32 (K, 3)
scales/outlier          ρ of the outliers, float32 (O,)
anchor/...              what the prior is anchored at; only where training may go on

A reader that has got as far as ``means`` can predict with the mean weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from peerbayes.errors import InputError
from peerbayes.posteriors.index_codec import decode, encode

if TYPE_CHECKING:
    from peerbayes.posteriors.shared import Shared

SHARES = 255  # steps of a blended weight's share
ANCHORED = ("anchor_component", "anchor_cholesky", "anchor_outlier")


def packed(posterior: Shared, anchors: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a posterior's tensors in the order of the file, and the lengths of those that are coded."""
    sizes, components = posterior.layout.sizes, len(posterior.component)
    outlier, place = posterior.outlier.cpu().sort()
    blended, turn = posterior.blended.cpu().sort()
    index = posterior.label.cpu().long()
    index[outlier], index[blended] = components, components + 1
    share = (posterior.blend_weight[:, 0].cpu()[turn] * SHARES).round().to(torch.uint8)
    coded = {
        "means/index": encode(index.numpy(), components + 2, sizes),
        "means/blend_component": encode(
            posterior.blend_component.cpu().long()[turn].reshape(-1).numpy(), components, [2 * len(blended)]
        ),
        "means/blend_weight": share.numpy().tobytes(),
    }
    fixed = {name: t for name, t in posterior.state().items() if name.startswith(("network/", "rest/"))}
    component = posterior.component.detach().cpu()
    tensors = dict(sorted(fixed.items(), key=lambda item: -item[1].element_size()))
    tensors |= {"means/component": component[:, 0], "means/outlier": posterior.outlier_mean.detach().cpu()[place]}
    tensors |= {name: _bytes(data) for name, data in coded.items()}
    tensors |= {
        "scales/component": component[:, 1],
        "scales/cholesky": posterior.cholesky,
        "scales/outlier": posterior.outlier_rho.detach().cpu()[place],
    }
    if anchors and posterior.prior == "anchored":
        tensors |= {
            "anchor/component": posterior.anchor_component,
            "anchor/cholesky": posterior.anchor_cholesky,
            "anchor/outlier": posterior.anchor_outlier.cpu()[place],
        }
    return tensors, {name: len(data) for name, data in coded.items()}


def _bytes(data: bytes) -> Tensor:
    # Padded, so that the tensors after it begin at a multiple of eight bytes.
    return torch.from_numpy(np.frombuffer(data + bytes(-len(data) % 8), np.uint8).copy())


def unpacked(tensors: Mapping[str, Tensor], about: Mapping[str, Any], sizes: list[int]) -> dict[str, Tensor]:
    """Return the state that `Shared.load_state` takes, of what `packed` made.

    Args:
        tensors: of the file.
        about: its description, with the lengths of coded tensors.
        sizes: of the shared tensors of the network.
    """
    found = {name: t for name, t in tensors.items() if name.startswith(("network/", "rest/"))}
    try:
        component = torch.stack([tensors["means/component"], tensors["scales/component"]], 1)
        lengths, components = about["coded"], len(component)
        coded = {name: _cut(tensors[name], int(lengths[name]), name) for name in lengths}
        index = decode(coded["means/index"], components + 2, sizes)
        outlier, blended = ((index == components + extra).nonzero()[:, 0] for extra in (0, 1))
        pairs = decode(coded["means/blend_component"], max(1, components), [2 * len(blended)]).view(-1, 2)
        share = torch.from_numpy(np.frombuffer(coded["means/blend_weight"], np.uint8).copy()).float()
        mean, rho = tensors["means/outlier"], tensors["scales/outlier"]
        cholesky = tensors["scales/cholesky"]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"a file of shared weights is not complete ({error})") from None
    if len(share) != len(blended) or len(mean) != len(outlier):
        raise InputError(
            f"a file of shared weights has {len(outlier)} outliers and {len(blended)} blended weights in its index, "
            f"but values for {len(mean)} and {len(share)}"
        )
    label = torch.where(index < components, index, 0).int()
    anchors = {
        "component": tensors.get("anchor/component", component),
        "cholesky": tensors.get("anchor/cholesky", cholesky),
        "outlier": tensors.get("anchor/outlier", mean),
    }
    book = {
        "component": component,
        "cholesky": cholesky,
        "outlier_mean": mean,
        "outlier_rho": rho,
        "label": label,
        "blended": blended,
        "blend_component": pairs.int(),
        "blend_weight": torch.stack([share / SHARES, (SHARES - share) / SHARES], 1),
        "outlier": outlier,
        **{f"anchor_{name}": tensor for name, tensor in anchors.items()},
    }
    return found | {f"codebook/{name}": tensor for name, tensor in book.items()}


def _cut(tensor: Tensor, length: int, name: str) -> bytes:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not 0 <= length <= len(tensor) < length + 8:
        raise InputError(f"a file of shared weights is damaged: '{name}' does not have the {length} bytes it should")
    return tensor.numpy().tobytes()[:length]
