"""Bytes of the index, and the accuracy of the mean network, of a trained network's codebooks; nothing is trained after.

    python benchmarks/index_bytes.py RUN [--data-root DIR] [--images 2000] [--out FILE]

RUN is a run folder with one peer. Codebooks have no outliers and no blended weights: by k-means with so many
components, and by thrift.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from peerbayes import load, networks
from peerbayes.codebook.build import Sharing, share, shared_weights
from peerbayes.codebook.coder import arrange, encode
from peerbayes.data import to_unit
from peerbayes.engine.processes import environment
from peerbayes.posteriors import MeanField
from peerbayes.recipes.recipe_data import load_data, network_inputs

SETTINGS = [{"components": count} for count in (16, 32, 64, 256)]
SETTINGS += [{"thrift": thrift} for thrift in (0.003, 0.006, 0.012, 0.03)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--data-root")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    run = load(given.run)
    (peer,) = run
    loaded = load_data(run.recipe, given.data_root)
    images, labels = to_unit(loaded.test.images[: given.images]), loaded.test.labels[: given.images]
    network = networks.build(run.recipe.peers[0].network, network_inputs(loaded))
    posterior = MeanField(network, gain=0.01, start_from=run.weights_file(peer))

    def judged() -> dict[str, float]:
        p = posterior.predict(images, draws=1, settle=None).probabilities
        nll = -p[torch.arange(len(labels)), labels].log().mean()
        return {"accuracy": (p.argmax(-1) == labels).float().mean().item(), "nll": nll.item()}

    posterior.rho.data.fill_(-30.0)  # the mean network
    layout, mean, _ = shared_weights(posterior)
    views = posterior.layout.views(posterior.mean.data)

    def put(flat: torch.Tensor) -> None:
        for name, values in layout.views(flat).items():
            views[name].copy_(values)

    rows = [{"setting": "float32", "bytes": 4 * layout.size, **judged()}]
    for options in SETTINGS:
        put(mean)
        book, _ = share(posterior, Sharing(**options, outliers=False, blend=False, merge={"distance": 0}), None)
        order = torch.from_numpy(arrange(book.label, book.component[:, 0], layout.sizes).copy())
        size = len(encode(order.argsort()[book.label], len(order), layout.sizes))
        put(book.component[book.label, 0])
        (setting,) = (f"{key} {value}" for key, value in options.items())
        rows.append({"setting": setting, "components": len(order), "bytes": size, **judged()})
        print(rows[-1], flush=True)
    if given.out:
        about = {"network": run.recipe.peers[0].network, "dataset": loaded.name, "images": len(labels)}
        about |= {"recipe": run.recipe.name, "seed": run.seed, **environment(torch.device("cpu"))}
        given.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
