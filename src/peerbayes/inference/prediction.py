"""Average many draws into one prediction, in memory that does not grow with their number."""

from __future__ import annotations

import csv
import functools
import importlib
import io
import math
import operator
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from peerbayes.data.splits import Split
from peerbayes.errors import InputError, PeerbayesWarning, reason
from peerbayes.inference.batch_norm import Folded
from peerbayes.inference.early_stopping import Referee
from peerbayes.inference.progress import watcher_now
from peerbayes.math.noise import Address
from peerbayes.networks.inputs import prepared
from peerbayes.networks.running import evaluating, tried_kernels
from peerbayes.posteriors import storage
from peerbayes.posteriors.certificate import Certificate
from peerbayes.showing import aligned, html_table

if TYPE_CHECKING:
    from peerbayes.posteriors.base import Posterior
    from peerbayes.posteriors.flat_network import Weights

Precision = Literal["auto", "float32", "bfloat16", "float16"]
PRECISIONS: dict[str, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, repr=False)
class Prediction:
    """The average prediction of many draws.

    Attributes:
        log_probabilities: log softmax(log p̄ / T), with p̄ = (1/S) Σ_s p_s; probabilities are averaged, never logits.
            (N, C).
        expected_entropy: (1/S) Σ_s H[p_s] in nats. (N,).
        draws: number of draws of each image. (N,), int64.
        address: of the draws; draw s is at ``address.at(s)``.
        temperature: T; 1 for an uncalibrated prediction.
        inputs: names of the inputs, such as files or texts; by default their numbers.
        kind: of the inputs, the heading of their column.
        class_names: of the classes; by default their numbers.
        certificate: of ``sets``, ``abstain`` or both; None without promises.

    Example:
        >>> import torch
        >>> from peerbayes import MeanField
        >>> posterior = MeanField(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)))
        >>> prediction = posterior.predict(torch.zeros(2, 1, 8, 8), draws=5)
        >>> prediction.probabilities.shape, prediction.draws.tolist()
        (torch.Size([2, 3]), [5, 5])
        >>> bool((prediction.disagreement <= prediction.entropy).all())
        True
    """

    log_probabilities: Tensor
    expected_entropy: Tensor
    draws: Tensor
    address: Address
    _posterior: Posterior | None = field(default=None, repr=False, compare=False)
    temperature: float = 1.0
    _raw: Tensor | None = field(default=None, repr=False, compare=False)
    inputs: Sequence[str] | None = None
    kind: str = "input"
    class_names: Sequence[str] | None = None
    certificate: Certificate | None = None

    @property
    def probabilities(self) -> Tensor:
        """p̄, tempered; shape (N, C)."""
        return self.log_probabilities.exp()

    @property
    def classes(self) -> Tensor:
        """The most probable class, shape (N,)."""
        return self.log_probabilities.argmax(-1)

    @property
    def entropy(self) -> Tensor:
        """H[p̄], tempered, in nats; shape (N,)."""
        return entropy_of(self.log_probabilities)

    @property
    def raw(self) -> Prediction:
        """The prediction at temperature 1: the plain average of the draws."""
        if self._raw is None:
            return self if self.certificate is None else replace(self, certificate=None)
        return replace(self, log_probabilities=self._raw, temperature=1.0, _raw=None, certificate=None)

    def tempered(self, temperature: float) -> Prediction:
        """Return the prediction softmax(log p̄ / T) of the plain average p̄, whatever its present temperature."""
        raw = self.raw
        if temperature == 1:
            return raw
        if not 0 < temperature < math.inf:
            raise InputError(f"temperature is {temperature}, expected a positive number")
        log_p = (raw.log_probabilities / temperature).log_softmax(-1)
        return replace(raw, log_probabilities=log_p, temperature=temperature, _raw=raw.log_probabilities)

    def promising(self, certificate: Certificate) -> Prediction:
        """Return the prediction with `sets` and `abstain`, if the certificate promises them.

        Args:
            certificate: of predictions with the same temperature, classes and, for one posterior, draws.
        """
        own_values = {"temperature": self.temperature, "classes": self.log_probabilities.shape[-1]}
        if self._posterior is not None and self._posterior.stochastic and len(self):
            own_values["draws"] = int(self.draws.min())
        for name, value in own_values.items():
            if value != (promised := getattr(certificate, name)):
                raise InputError(f"the certificate is of predictions of {name} {promised}, but this one has {value}")
        return replace(self, certificate=certificate)

    @property
    def sets(self) -> Tensor:
        """Prediction sets, which hold the true class as often as promised. Bool (N, C)."""
        if self.certificate is None or self.certificate.coverage is None:
            raise InputError(
                "this prediction has no sets; predict with coverage=..., which `peerbayes.calibrate` promises"
            )
        return self.certificate.sets(self.log_probabilities)

    @property
    def abstain(self) -> Tensor:
        """Inputs to leave unanswered, so that no more answers are wrong than promised. Bool (N,)."""
        if self.certificate is None or self.certificate.risk is None:
            raise InputError(
                "this prediction abstains from nothing; predict with risk=..., which `peerbayes.calibrate` promises"
            )
        return self.certificate.abstain(self.log_probabilities)

    @property
    def _set_names(self) -> list[list[str]]:
        """The names of the classes in each set, the most probable one first."""
        names, ordered = self._names, self.log_probabilities.sort(dim=-1, descending=True, stable=True).indices
        inside = self.sets.gather(-1, ordered)
        rows = zip(ordered.tolist(), inside.tolist(), strict=True)
        return [[names[number] for number, has in zip(*row, strict=True) if has] for row in rows]

    @property
    def disagreement(self) -> Tensor:
        """BALD: H[p̄] − (1/S) Σ_s H[p_s], the mutual information of label and weights. (N,), ≥ 0.

        It does not depend on the temperature.
        """
        return (self.raw.entropy - self.expected_entropy).clamp_min(0)

    @property
    def labels(self) -> list[str]:
        """The name of the most probable class of each input."""
        names = self._names
        return [names[number] for number in self.classes.tolist()]

    @property
    def columns(self) -> dict[str, list[Any]]:
        """Columns of tables by heading: input, class, probability, entropy, disagreement, set and abstention."""
        inputs = map(str, range(len(self))) if self.inputs is None else self.inputs
        promised: dict[str, list[Any]] = {}
        if self.certificate is not None and self.certificate.coverage is not None:
            promised["set"] = [" | ".join(names) for names in self._set_names]
        if self.certificate is not None and self.certificate.risk is not None:
            promised["abstain"] = self.abstain.tolist()
        return {
            self.kind: list(inputs),
            "class": self.labels,
            "probability": self.probabilities.amax(-1).tolist(),
            "entropy": self.entropy.tolist(),
            "disagreement": self.disagreement.tolist(),
            **promised,
        }

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield `columns` for each input, with the probabilities of all classes by name."""
        columns, names = self.columns, self._names
        if "set" in columns:
            columns["set"] = self._set_names
        for cells, probabilities in zip(zip(*columns.values(), strict=True), self.probabilities.tolist(), strict=True):
            row = dict(zip(columns, cells, strict=True))
            yield row | {"probabilities": dict(zip(names, probabilities, strict=True))}

    def to_pandas(self, probabilities: bool = False) -> Any:
        """Return `columns` as a `pandas.DataFrame`; ``probabilities`` adds a column ``p(NAME)`` for each class."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise InputError("to_pandas needs pandas, which is not installed: pip install pandas") from None
        return pandas.DataFrame(self._table(probabilities))

    def to_csv(self, path: str | Path, probabilities: bool = False) -> None:
        """Write `columns` to a CSV file, atomically.

        Args:
            path: the file.
            probabilities: add a column ``p(NAME)`` for each class.
        """
        columns, text = self._table(probabilities), io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(columns)
        rows.writerows(zip(*columns.values(), strict=True))
        storage.write_bytes(Path(path), text.getvalue().encode())

    def _table(self, probabilities: bool) -> dict[str, list[Any]]:
        if not probabilities:
            return self.columns
        by_class = zip(self._names, self.probabilities.T.tolist(), strict=True)
        return self.columns | {f"p({name})": values for name, values in by_class}

    @property
    def _names(self) -> list[str]:
        count = self.log_probabilities.shape[-1]
        names = list(self.class_names or ())
        if len(names) != count:
            return [str(number) for number in range(count)]
        return names if len(set(names)) == count else [f"{number} {name}" for number, name in enumerate(names)]

    def __len__(self) -> int:
        return len(self.log_probabilities)

    def __getitem__(self, rows: slice) -> Prediction:
        """Return the prediction of some of the inputs, ``prediction[:10]``."""
        if not isinstance(rows, slice):
            raise InputError(f"expected a slice of a prediction, such as [:10], got {rows!r}")
        inputs = [str(number) for number in range(len(self))[rows]] if self.inputs is None else self.inputs[rows]
        by_input: dict[str, Any] = {name: value[rows] for name, value in self.by_input().items()}
        return replace(self, **by_input, inputs=inputs)

    def by_input(self) -> dict[str, Any]:
        """Return the tensors with a row for each input, by the name of their field."""
        names = ("log_probabilities", "expected_entropy", "draws", "_raw")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @classmethod
    def joined(cls, parts: Sequence[Prediction]) -> Prediction:
        """Concatenate predictions of successive batches."""
        first, *others = parts
        if not others:
            return first
        whole: dict[str, Any] = {
            name: torch.cat([part.by_input()[name] for part in parts]) for name in first.by_input()
        }
        inputs = [name for part in parts for name in part.columns[first.kind]] if first.inputs is not None else None
        return replace(first, **whole, inputs=inputs)

    def rows(self, most: int | None = None) -> list[list[str]]:
        """Return `columns` as cells of text, headings first; ``most`` limits the inputs and shortens texts."""
        shown = self if most is None else self[:most]
        columns = shown.columns
        if "set" in columns:
            columns["set"] = [_in_short(names) for names in shown._set_names]
        rows = [[_cell(value) for value in row] for row in zip(*columns.values(), strict=True)]
        if most is not None and self.kind == "text":
            rows = [[text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…", *others] for text, *others in rows]
        return [list(columns), *rows]

    def _caption(self) -> str:
        count, most = len(self), int(self.draws.max()) if len(self) else 0
        draws = f"{most} draw{'s' * (most != 1)}"
        tempered = "" if self.temperature == 1 else f", temperature {self.temperature:.3g}"
        return f"Prediction of {count:,} {self.kind}{'s' * (count != 1)}: {draws}{tempered}"

    def _omitted(self) -> str:
        return f"and {len(self) - SHOWN:,} more" if len(self) > SHOWN else ""

    def __repr__(self) -> str:
        return "\n".join(filter(None, [self._caption(), *aligned(self.rows(SHOWN), 2), self._omitted()]))

    def _repr_html_(self) -> str:
        more = self._omitted()
        return f"<p>{self._caption()}</p>{html_table(self.rows(SHOWN), 2)}" + (f"<p>{more}</p>" if more else "")

    def replay(self, draw: int) -> Weights:
        """Return the exact weights of one of the draws."""
        if not (isinstance(draw, SupportsIndex) and 0 <= operator.index(draw) < int(self.draws.max())):
            raise InputError(
                f"there is no draw {draw}: the prediction was made of draws 0 to {int(self.draws.max()) - 1}"
            )
        if self._posterior is None:
            raise InputError(
                "cannot replay a prediction without a posterior, or of several peers: replay that of one peer, or use "
                "posterior.draw(prediction.address.at(n))"
            )
        with torch.no_grad():  # as in the prediction: a draw with gradients may round differently
            return self._posterior.draw(self.address.at(draw))


# Numbers in a batch of images up to which all draws at once (vmap) are faster than one after another.
# Measured as a ratio of times: on 2 CPU cores ResNet-20 0.75 at 4 images of 3×32×32, 1.0 at 16 and 2.4 at 64, ResNet-8
# 0.6 at 256 images of 8×8; on an H200 ResNet-20 0.26 at 1 image, 0.58 at 128 and 1.0 at 512 (results/bench-h200.json).
TOGETHER = {"cpu": 16_384, "cuda": 500_000}
BATCH = {"cpu": 128 * 3072, "cuda": 1 << 25}  # numbers in the images of one forward pass; more leave a CPU's caches
MOST_AT_ONCE = 64  # draws at once; more are no faster, and would take memory that grows with the draws
MEMORY = 1 << 30  # bytes that draws at once, or images as floats, may take, roughly
TRY_KERNELS = 100_000  # image-draws from which on it pays to let cuDNN try its kernels
IMAGES = 1 << 28  # bytes of images that a split is predicted in
SHOWN = 10  # inputs that are printed
MAX_CLASSES_SHOWN = 4  # classes of a set that are printed
WIDTH = 60  # characters of a text that are printed


@torch.no_grad()
def predict(
    posterior: Posterior,
    images: Tensor,
    draws: int = 50,
    *,
    seed: int | None = None,
    name: str | None = None,
    batch_size: int | None = None,
    settle: float | None = None,
    precision: Precision = "auto",
    calibrated: bool = True,
) -> Prediction:
    """Average the probabilities of ``draws`` networks: p̄ = (1/S) Σ_s softmax(z_s), as a running log-sum-exp.

    Each draw runs over all images, so the result does not depend on ``batch_size``, unless the network has batch-norm
    without running statistics, which gives a warning. Draws run one after another, or, for few small images, all at
    once.

    Args:
        posterior: any posterior; a point needs one pass.
        images: (N, ...) on any device, uint8 or in [0, 1].
        draws: S, or the most draws an image may get when ``settle`` is given.
        seed: with ``name``, the address of the draws; by default the posterior's.
        name: the peer's name in the address; by default the posterior's.
        batch_size: images in a forward pass; by default 128 of 3×32×32 on a CPU and 10,922 on a GPU. It is halved if a
            GPU runs out of memory.
        settle: stop drawing for an image once its predicted class is certain at this error level: with infinitely
            many draws the class differs with probability at most ``settle``, however often it is checked.
        precision: of the network; ``auto`` is float16 on a GPU, if nothing overflows, else float32.
        calibrated: temper p̄ by the posterior's fitted temperature.
    """
    for option, number in (("draws", draws), ("batch_size", batch_size)):
        if number is not None and not (isinstance(number, SupportsIndex) and operator.index(number) >= 1):
            raise InputError(f"{option} is {number!r}, expected a whole number of at least 1")
    _check_images(posterior, images)
    if settle is not None and not 0 < settle < 1:
        raise InputError(f"settle is {settle}, expected an error level between 0 and 1")
    if precision not in PRECISIONS and precision != "auto":
        raise InputError(f"precision is '{precision}', expected auto, {', '.join(PRECISIONS)}")
    _warn_of_joint_batch(posterior)
    address = Address(posterior.seed if seed is None else seed, posterior.name if name is None else name, "draw")
    kind = posterior.device.type
    if kind == "cpu":
        _keep_heap()
    half = PRECISIONS["float16" if kind == "cuda" else "float32"] if precision == "auto" else PRECISIONS[precision]
    draws = draws if posterior.stochastic else 1
    size = batch_size or max(1, BATCH.get(kind, BATCH["cpu"]) // _numbers(images[:1]))
    many = kind == "cuda" and len(images) * draws >= TRY_KERNELS
    with evaluating(posterior):
        while True:
            watcher_now.get().begin(len(images) * draws)
            try:
                with tried_kernels(many):
                    prediction = _average(posterior, images, draws, address, size, settle, half)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                size = max(1, min(size, len(images)) // 2)
                continue
            except Exception as error:  # a user's network may raise anything
                shape, learnt = tuple(images.shape[1:]), posterior.input_shape
                if learnt in (None, shape):
                    raise
                hint = f"it was trained on shape {learnt}"
                raise InputError(f"the network can't take images of shape {shape}, {hint}: {reason(error)}") from error
            if precision != "auto" or half is None or bool(prediction.log_probabilities.isfinite().any(-1).all()):
                return prediction.tempered(posterior.temperature) if calibrated else prediction
            half = None


def _check_images(posterior: Posterior, images: Any) -> None:
    if not isinstance(images, Tensor):
        hint = " (run.vocabulary.encode makes one of texts)" if isinstance(images, str | list | tuple) else ""
        raise InputError(f"images are of type {type(images).__name__}, expected a tensor{hint}")
    learnt = posterior.input_shape
    if learnt is not None and images.dim() != 1 + len(learnt):
        expected = f"(N, {', '.join(map(str, learnt))})"
        raise InputError(f"images have shape {tuple(images.shape)}, expected {expected}, as in training")
    if images.dim() == 4 and not images.is_floating_point() and images.dtype != torch.uint8:
        raise InputError(f"images are of type {images.dtype}, expected uint8, or floats in [0, 1]")
    if learnt is not None and len(learnt) == 1 and images.is_floating_point():
        raise InputError(f"texts are of type {images.dtype}, expected token numbers (run.vocabulary.encode makes them)")
    if images.dim() == 0 or len(images) == 0:
        raise InputError("there are no images to predict")
    if images.dim() == 4 and images.is_floating_point() and images.device.type == "cpu":  # a GPU would have to wait
        low, high = (float(end) for end in images.aminmax())
        if math.isnan(low):
            raise InputError("images hold values that are not a number (NaN), expected uint8 or [0, 1]")
        if low < 0 or high > 1:
            warnings.warn(
                f"images have values from {low:.4g} to {high:.4g}, expected uint8 or [0, 1], as in training",
                PeerbayesWarning,
                stacklevel=5,
            )


def _warn_of_joint_batch(posterior: Posterior) -> None:
    """Warn once for each posterior if predictions depend on the other images of a batch."""
    if posterior.told_of_batch:
        return
    posterior.told_of_batch = True
    layers = joint_layers(posterior)
    if layers:
        more = f" (and {len(layers) - 1} more)" if layers[1:] else ""
        warnings.warn(
            f"layer '{layers[0]}'{more} is batch-norm without running statistics, so the prediction of an image "
            "depends on batch_size and on the other images; train with track_running_stats=True, or normalise each "
            "image separately (GroupNorm, say)",
            PeerbayesWarning,
            stacklevel=5,
        )


def joint_layers(posterior: Posterior) -> list[str]:
    """Return the layers that make the prediction of an input depend on the other inputs of its batch."""
    return [
        name
        for name, module in posterior.network.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is None and module.running_var is None
    ]


def predict_split(
    posterior: Posterior, split: Split, draws: int, *, seed: int, name: str, settle: float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Predict a whole split in chunks that fit in memory, at temperature 1.

    Args:
        posterior: on its device.
        split: inputs, with labels or without.
        draws: number of draws.
        seed: with ``name``, the address of the draws.
        name: the peer's.
        settle: error level of early stopping of draws; None for none.

    Returns:
        log-probabilities (N, C), labels (N,), disagreement (N,) and draws spent (N,), on the CPU.
    """
    parts: list[tuple[Tensor, ...]] = []
    first, _ = split.batch(torch.zeros(1, dtype=torch.int64), torch.device("cpu"))
    for index in torch.arange(len(split)).split(max(1, IMAGES // first.nbytes)):
        images, labels = split.batch(index, posterior.device)
        prediction = posterior.predict(images, draws, seed=seed, name=name, settle=settle, calibrated=False)
        parts.append(
            (prediction.log_probabilities.cpu(), labels.cpu(), prediction.disagreement.cpu(), prediction.draws.cpu())
        )
    log_p, labels, disagreement, spent = (torch.cat(part) for part in zip(*parts, strict=True))
    return log_p, labels, disagreement, spent


def _average(
    posterior: Posterior,
    images: Tensor,
    draws: int,
    address: Address,
    batch_size: int,
    settle: float | None,
    half: torch.dtype | None,
) -> Prediction:
    if settle is not None:
        return _settle(posterior, images, draws, address, batch_size, settle, half)
    device = posterior.device
    total, entropy = torch.empty(0, device=device), torch.zeros(len(images), device=device)
    for log_p in _passes(posterior, images, draws, address, batch_size, half):
        averaged = log_p.logsumexp(0) if len(log_p) > 1 else log_p[0]
        total = torch.logaddexp(total, averaged) if total.numel() else averaged
        entropy += entropy_of(log_p).sum(0)
    count = torch.full((len(images),), draws, device=device)
    return Prediction(
        total - math.log(draws), entropy / draws, count, address, posterior, class_names=posterior.class_names
    )


def _passes(
    posterior: Posterior, images: Tensor, draws: int, address: Address, batch_size: int, half: torch.dtype | None
) -> Iterator[Tensor]:
    """Yield log-probabilities (S', N, C), one draw after another or many at once."""
    device, first = posterior.device, 0
    together = _draws_at_once(posterior, images, draws)
    if together > 1:
        network, whole = Folded(posterior), images.to(device)
        kept = torch.empty(together, posterior.layout.size, device=device)  # one buffer for all: heaps fragment
        for begin in range(0, draws, together):
            numbers = range(begin, min(begin + together, draws))
            flats = kept[: len(numbers)]
            for flat, number in zip(flats, numbers, strict=True):
                flat.copy_(posterior.draw(address.at(number)).flat)
            try:
                with torch.autocast(device.type, half, enabled=half is not None), warnings.catch_warnings():
                    warnings.filterwarnings("error", "There is a performance drop", UserWarning)
                    logits = torch.vmap(functools.partial(network, whole))(flats)
            except (RuntimeError, NotImplementedError, UserWarning):
                break  # the network can't be vectorised, or memory is too small
            yield logits.float().log_softmax(-1)
            first += len(numbers)
            watcher_now.get().advance(len(numbers) * len(images))
    network, batches = Folded(posterior, half), list(images.split(batch_size))
    if draws - first > 1 and 4 * images.numel() <= MEMORY:
        batches = [prepared(part.to(device)) for part in batches]  # once for all draws
    for number in range(first, draws):
        flat = posterior.draw(address.at(number)).flat
        yield torch.cat([_pass(network, part.to(device), flat) for part in batches])[None]


def _pass(network: Folded, images: Tensor, flat: Tensor) -> Tensor:
    log_p: Tensor = network(images, flat).float().log_softmax(-1)
    watcher_now.get().advance(len(images))
    return log_p


def _draws_at_once(posterior: Posterior, images: Tensor, draws: int) -> int:
    limit, numbers = TOGETHER.get(posterior.device.type, 0), _numbers(images)
    if numbers > limit:
        return 1
    bytes_a_draw = 4 * (2 * posterior.layout.size + 64 * numbers)  # weights and activations
    return min(draws, MOST_AT_ONCE, max(1, MEMORY // bytes_a_draw))


def _numbers(images: Tensor) -> int:
    # A token becomes a vector as soon as it is in the network.
    tokens = not images.is_floating_point() and images.dtype != torch.uint8
    return images.numel() * (64 if tokens else 1)


def _settle(
    posterior: Posterior,
    images: Tensor,
    draws: int,
    address: Address,
    batch_size: int,
    settle: float,
    half: torch.dtype | None,
) -> Prediction:
    device = posterior.device
    network = Folded(posterior, half)
    active = torch.arange(len(images))
    spent = torch.zeros(len(images), dtype=torch.int64)
    total: Tensor | None = None
    referee: Referee | None = None
    entropy = torch.zeros(len(images), device=device)
    for number in range(draws):
        flat = posterior.draw(address.at(number)).flat
        parts = active.split(batch_size)
        log_p = torch.cat([_pass(network, images[part.to(images.device)].to(device), flat) for part in parts])
        here = active.to(device)
        if total is None or referee is None:
            total = torch.full((len(images), log_p.shape[1]), -math.inf, device=device)
            referee = Referee(log_p, settle)
        total[here] = torch.logaddexp(total[here], log_p)
        entropy[here] += entropy_of(log_p)
        spent[active] += 1
        settled = referee.settled(here, log_p.exp(), total[here])
        if (number + 1) % posterior.members == 0:  # these come in order: some of them are no sample of all
            active = active[~settled.cpu()]
        if len(active) == 0:
            break
    assert total is not None
    count = spent.to(device)
    return Prediction(
        total - count.log()[:, None], entropy / count, count, address, posterior, class_names=posterior.class_names
    )


def _in_short(names: Sequence[str]) -> str:
    more = f" … {len(names) - MAX_CLASSES_SHOWN} more" if len(names) > MAX_CLASSES_SHOWN else ""
    return " | ".join(names[:MAX_CLASSES_SHOWN]) + more or "-"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:.3f}" if isinstance(value, float) else " ".join(str(value).split())


@functools.cache
def _keep_heap() -> None:
    # glibc returns the top of its heap to the system whenever a pass frees its activations, and the next pass faults it
    # in again page by page: a fifth of the time of a prediction. Freeing one large block, which is never touched,
    # raises its threshold for that from a few MiB to 62 MiB, once a process; other C libraries take no notice.
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


def mean_of(log_p: Tensor) -> Tensor:
    """Return log (1/K) Σ_k p_k for log-probabilities (K, N, C)."""
    return log_p.logsumexp(0) - math.log(len(log_p))


def entropy_of(log_p: Tensor) -> Tensor:
    """Return −Σ_c p_c log p_c in nats (...), of log-probabilities (..., C)."""
    entropy: Tensor = torch.special.entr(log_p.exp()).sum(-1)
    return entropy
