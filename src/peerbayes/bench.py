"""Speed and memory on this machine: engines, a point pair, bayesian-torch, prediction, shared weights, and growth.

Images are random. In a record ``measurements`` holds what was timed, and ``figures`` is a function of it alone.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import importlib.metadata
import json
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from peerbayes import networks
from peerbayes.data import ArraySplit, Dataset
from peerbayes.errors import InputError, nearest
from peerbayes.learning import Learner, Recipe, Reporter, environment, load_recipe
from peerbayes.learning.engine import Name
from peerbayes.learning.run import network_inputs, pick_device, read_json
from peerbayes.learning.sources import build_peer
from peerbayes.learning.teachers import Teachers
from peerbayes.noise import Address, normal
from peerbayes.posteriors import Codebook, MeanField, Point, Posterior, RankOne, Shared, prediction, storage
from peerbayes.posteriors.shared import SAMPLINGS
from peerbayes.sharing import Sharing, share, shared_weights

EPOCH, PREDICTED, DRAWS, PACKED = 50_000, 10_000, 50, 3  # images; images and draws predicted; pairs side by side
NEEDS_GPU = "needs a CUDA device"
MEMORY = {engine: f"{engine}_pair_epoch_s" for engine in ("eager", "compiled")}
MEMORY |= {"captured": "pair_epoch_s", "packed3": "packed3_epoch_s"}
THEIRS = {"bayesian_torch_float32_step_ms": None, "bayesian_torch_bfloat16_step_ms": torch.bfloat16}
RATIOS = {
    "bayesian_over_deterministic": ("bayesian_pair_epoch_s", "deterministic_pair_epoch_s"),
    "speedup_single": ("bayesian_torch_step_ms", "single_step_ms"),
    "speedup_packed": ("bayesian_torch_step_ms", "packed_network_step_ms"),
    "latentbe_over_kd": ("distillation.latentbe_step_ms", "distillation.kd_step_ms"),
    "tdiv_sdiv_over_kd": ("distillation.latentbe_tdiv_sdiv_step_ms", "distillation.kd_step_ms"),
    "moment_draw_over_mean_field": ("sharing.moment_draw_ms", "sharing.mean_field_draw_ms"),
    "hierarchical_draw_over_mean_field": ("sharing.hierarchical_draw_ms", "sharing.mean_field_draw_ms"),
}
STUDENTS = ("kd", "latentbe", "latentbe-tdiv-sdiv")  # recipes of distillation, cheapest first
MEMBERS = ("average", "members", "tiled")  # how a rank-one student predicts: one network, each member, all at once
FIELD = "mean_field"  # Bayes by Backprop, which shared weights are measured against
LEARNING = {"point": "dnn", FIELD: "stage1", **dict.fromkeys(("hierarchical", "moment", "cluster"), "shared")}
SOURCES = {  # what a figure that is not timed itself is made of
    "bayesian_torch_step_ms": tuple(THEIRS),
    "packed_network_step_ms": ("packed3_epoch_s",),
    **RATIOS,
    "predict_rate": ("predict_50x10k_s",),
    **{f"peak_memory_gib.{engine}": (key,) for engine, key in MEMORY.items()},
}
Measured = dict[str, dict[str, Any]]
Measurement = tuple[tuple[str, ...], bool, Callable[[], Measured]]  # keys, whether it needs a GPU, and how


@dataclass(frozen=True)
class Plan:
    """How much is timed; an epoch is scaled from ``steps`` of a pair, ``some`` (growth) or ``few`` (slow engines)."""

    engine: Name = "captured"
    precision: str = "bfloat16"
    images: int = EPOCH
    batch: int = 128
    warm_up: int = 20
    steps: int = 390
    some: int = 100
    few: int = 30
    repeats: int = 3
    predicted: int = PREDICTED
    draws: int = DRAWS
    growing: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    small: tuple[int, ...] = (1, 8, 32, 128, 512)
    networks: tuple[str, ...] = ("resnet20", "resnet32", "resnet56")  # the first one wherever nothing grows
    peers: tuple[int, ...] = (2, 4, 8)
    student: str = "wrn28x1"  # of four teachers like it
    shared: str = "resnet18"  # whose weights share so many components, at first
    components: int = 6000


CPU = Plan("eager", "float32", 4096, 32, 1, 3, 3, 3, 3, 256, 10, (1, 2, 4, 8, 16), (1, 8, 32))
CPU = replace(CPU, shared="resnet20", components=500)
QUICK = Plan("eager", "float32", 64, 4, 1, 1, 1, 1, 2, 4, 2, (1, 2), (1, 2), ("resnet8",), (2,), "resnet8")
QUICK = replace(QUICK, shared="resnet8", components=20)


class _Strict(Reporter):
    """A warning is a failure: an engine that gave up would be timed under another one's name."""

    def warn(self, text: str) -> None:
        raise RuntimeError(text)


class Cohorts:
    """Cohorts of a recipe, warmed up, that step in turn; ``setup_s`` goes from building them to their first step."""

    def __init__(
        self,
        bench: Bench,
        recipe: Recipe,
        engine: Name,
        count: int = 1,
        teachers: Teachers | None = None,
        peer: Posterior | None = None,
    ) -> None:
        began = time.perf_counter()
        how: dict[str, Any] = {"reporter": _Strict(), "engine": engine, "autocast": bench.autocast}
        how["teachers"] = teachers
        self.learners = []
        for seed in range(count):
            build = partial(build_peer, recipe=recipe, loaded=bench.data, seed=seed, runs=Path(), device=bench.device)
            peers = {p.name: build(p) if peer is None else peer for p in recipe.peers}
            self.learners.append(Learner(recipe, peers, bench.data, seed, **how))
        self._running = [learner.steps() for learner in self.learners]
        for learner, running in zip(self.learners, self._running, strict=True):
            with learner.engine.running():
                next(running)  # compiles, captures
        bench.wait()
        self.setup_s = time.perf_counter() - began
        self.step(bench.plan.warm_up)

    def step(self, count: int) -> None:
        """Let every cohort train for so many steps."""
        for _ in range(count):
            for learner in self.learners:
                with learner.engine.running():
                    learner.step()


class Bench:
    """A device, random data, and what can be timed with them."""

    def __init__(self, device: torch.device, plan: Plan) -> None:
        self.device, self.plan, self.on_gpu = device, plan, device.type == "cuda"
        self.autocast = torch.bfloat16 if plan.precision == "bfloat16" else None
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (plan.images, 3, 32, 32), dtype=torch.uint8, generator=generator)
        split = ArraySplit(images, torch.randint(0, 100, (plan.images,), generator=generator))
        self.data = Dataset("random", split, None, split, 100, None, (3, 32, 32), (0.5,) * 3, (0.25,) * 3)

    def wait(self) -> None:
        """Wait until the device has done what it was asked."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, function: Callable[[], Any]) -> float:
        """Return the wall time of a call and of what it asks of the device."""
        self.wait()
        began = time.perf_counter()
        function()
        self.wait()
        return time.perf_counter() - began

    def times(self, scale: float, functions: Mapping[str, Callable[[], Any]]) -> Measured:
        """Time functions in turn, in rounds; return their measurements, times ``scale``."""
        rounds = [[self.seconds(function) * scale for function in functions.values()] for _ in range(self.plan.repeats)]
        return {
            name: {"median": statistics.median(found), "spread": [min(found), max(found)], "repeats": len(found)}
            for name, found in zip(functions, zip(*rounds, strict=True), strict=True)
        }

    def recipe(self, method: str, peers: int = 2, network: str = "", point: bool = False, terms: str = "") -> Recipe:
        """Return the first stage of a CIFAR-100 recipe, or some of its terms, for peers alike and from scratch."""
        table = load_recipe(f"mutual/cifar100-resnet20-{method}").model_dump(exclude_none=True)
        posterior = {"kind": "point"} if point else table["peers"][0]["posterior"]
        peer = {"network": network or self.plan.networks[0], "posterior": posterior}
        table["peers"] = [peer | {"name": f"peer{n}"} for n in range(peers)]
        table["stages"] = [stage := table["stages"][0]]
        stage["terms"] = {name: stage["terms"][name] for name in terms.split() or stage["terms"]}
        table["data"]["batch_size"] = self.plan.batch
        return Recipe.parse(table | {"gradient_share_every": 0}, "the benchmark")

    def epochs(self, steps: int, engine: Name, recipes: Mapping[str, Recipe], count: int = 1) -> Measured:
        """Time epochs of cohorts by key, in turn; ``count`` of each step side by side. Adds their memory, on a GPU."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        whole = EPOCH // self.plan.batch
        about: dict[str, Any] = {"engine": engine, "precision": self.plan.precision, "steps": steps, "scaled_to": whole}
        cohorts = {key: Cohorts(self, recipe, engine, count) for key, recipe in recipes.items()}
        timed = self.times(whole / steps, {key: partial(found.step, steps) for key, found in cohorts.items()})
        if self.on_gpu:
            about["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
            about["peak_reserved_gib"] = torch.cuda.max_memory_reserved(self.device) / 2**30
        return {key: one | about | {"setup_s": cohorts[key].setup_s} for key, one in timed.items()}

    def against_bayesian_torch(self) -> Measured:
        """Time steps of one Bayesian ResNet-20 alone, ours and bayesian-torch's, in turn."""
        count, ours = self.plan.some, Cohorts(self, self.recipe("dml", 1, terms="likelihood kl"), self.plan.engine)
        steps: dict[str, Callable[[int], None]] = {"single_step_ms": ours.step}
        about: Measured = {"single_step_ms": {"setup_s": ours.setup_s, "images": "gathered and augmented"}}
        for key, precision in THEIRS.items():
            try:
                step = self.bayesian_torch_steps(precision)
                setup = self.seconds(partial(step, self.plan.warm_up))
            except Exception as error:  # theirs must not take ours with it
                about[key] = {"failed": _sentence(error)}
            else:
                steps[key] = step
                about[key] = {"setup_s": setup, "images": "one batch on the device, not augmented"}
        timed = self.times(1e3 / count, {key: partial(step, count) for key, step in steps.items()})
        return {key: timed.get(key, {}) | one | {"steps": count} for key, one in about.items()}

    def bayesian_torch_steps(self, precision: torch.dtype | None) -> Callable[[int], None]:
        """Return the loop of bayesian-torch's manual, for its ``dnn_to_bnn`` of our ResNet-20; cuDNN tries kernels."""
        room = importlib.import_module("bayesian_torch.models.dnn_to_bnn")
        network = networks.build(self.plan.networks[0], network_inputs(self.data))
        options = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0}
        room.dnn_to_bnn(network, options | {"type": "Reparameterization", "moped_enable": False, "moped_delta": 0.5})
        network.to(self.device).train()
        optimizer = torch.optim.Adam(network.parameters(), 1e-3)
        images, labels = self.data.train.batch(torch.arange(self.plan.batch), self.device)
        images = images.float() / 255

        def step(count: int) -> None:
            with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
                for _ in range(count):
                    optimizer.zero_grad()
                    with torch.autocast(self.device.type, precision, enabled=precision is not None):
                        logits = network(images)
                    (F.cross_entropy(logits.float(), labels) + room.get_kl_loss(network) / len(images)).backward()
                    optimizer.step()

        return step

    def distillation(self) -> Measured:
        """Time steps of one student of four untrained teachers, by recipe, in turn."""
        place = partial(build_peer, loaded=self.data, seed=0, runs=Path(), device=self.device)
        cohorts, teachers, count = {}, None, self.plan.some
        for name in STUDENTS:
            table = load_recipe(f"distillation/cifar10-wrn28x1-{name}-de4").model_dump(exclude_none=True)
            table["data"] |= {"batch_size": self.plan.batch, "classes": 100}
            table["peers"][0]["network"] = self.plan.student
            table["evaluation"]["keep"] = "last"
            recipe = Recipe.parse(table | {"gradient_share_every": 0}, "the benchmark")
            if teachers is None:
                like = [recipe.peers[0].model_copy(update={"name": f"teacher{number}"}) for number in range(4)]
                teachers = Teachers([place(peer, recipe) for peer in like])
            cohorts[f"distillation.{name.replace('-', '_')}_step_ms"] = Cohorts(
                self, recipe, self.plan.engine, teachers=teachers
            )
        timed = self.times(1e3 / count, {key: partial(found.step, count) for key, found in cohorts.items()})
        return {key: one | {"setup_s": cohorts[key].setup_s, "steps": count} for key, one in timed.items()}

    def members(self) -> Measured:
        """Time predictions of a rank-one student: of its average, of its members in turn, and of all in one pass."""
        images = self.data.train.batch(torch.arange(self.plan.predicted), self.device)[0]
        network, half = networks.build(self.plan.student, network_inputs(self.data)), torch.float16

        def tiled(student: RankOne) -> None:
            with torch.no_grad(), torch.autocast(self.device.type, half, enabled=self.on_gpu):
                for part in images.split(max(1, 2500 // student.members)):
                    student.forward_members(part)

        ways: dict[str, Callable[[], Any]] = {}
        for way in MEMBERS:
            student = RankOne(network, 4, predicts="average" if way == "average" else "members").to(self.device).eval()
            call = partial(tiled, student) if way == "tiled" else partial(student.predict, images, 4)
            ways[f"distillation.predict_{way}_s"] = call
        setup = {key: self.seconds(call) for key, call in ways.items()}
        timed = self.times(PREDICTED / self.plan.predicted, ways)
        return {key: one | {"setup_s": setup[key], "images": len(images)} for key, one in timed.items()}

    @cached_property
    def field(self) -> MeanField:
        """An untrained mean-field posterior that is to be shared."""
        network = networks.build(self.plan.shared, network_inputs(self.data))
        return MeanField(network, rho=-6.0, prior="anchored", prior_std=0.1).to(self.device)

    @cached_property
    def codebook(self) -> tuple[Codebook, dict[str, Any]]:
        """Its codebook, with the account of how it was made; noise stands for gradients."""
        gradient = normal(Address(0, "bench", "gradient"), shared_weights(self.field)[0].size, self.device)
        return share(self.field, Sharing(components=self.plan.components), gradient)

    def posterior(self, kind: str) -> Posterior:
        """Return a point, the mean-field posterior, or shared weights with some sampling."""
        if kind == "point":
            return Point(self.field.materialise()).to(self.device)
        if kind == FIELD:
            return copy.deepcopy(self.field)
        found = Shared(self.field.materialise(), self.codebook[0], sampling=kind)  # type: ignore[arg-type]
        return found.to(self.device)

    def clustering(self) -> Measured:
        """Time the way from a mean-field posterior to a codebook: outliers, components, merging, blending."""
        setup = self.seconds(lambda: self.codebook)

        def again() -> None:
            del self.codebook
            assert self.codebook

        timed = self.times(1.0, {"sharing.clustering_s": again})
        return {key: one | {"setup_s": setup, **self.codebook[1]} for key, one in timed.items()}

    def draws(self) -> Measured:
        """Time draws of a mean-field posterior and of shared weights by sampling, in turn."""
        kinds = {f"sharing.{kind}_draw_ms": self.posterior(kind) for kind in (FIELD, *SAMPLINGS)}
        count = max(10, self.plan.some)
        images = self.data.train.batch(torch.arange(1), self.device)[0]
        setup = {key: self.seconds(partial(posterior.predict, images, 2)) for key, posterior in kinds.items()}

        @torch.no_grad()
        def draw(posterior: Posterior) -> None:
            for number in range(count):
                posterior.draw(Address(0, "bench", "draw", number))

        timed = self.times(1e3 / count, {key: partial(draw, posterior) for key, posterior in kinds.items()})
        size = kinds["sharing.moment_draw_ms"].layout.size
        return {key: one | {"setup_s": setup[key], "weights": size, "draws": count} for key, one in timed.items()}

    def sharing_steps(self) -> Measured:
        """Time training steps of a point, a mean-field posterior and shared weights, one network alone, in turn."""
        cohorts, count = {}, self.plan.some
        for kind, recipe in LEARNING.items():
            table = load_recipe(f"sharing/cifar10-resnet18-{recipe}").model_dump(exclude_none=True)
            table["data"] |= {"batch_size": self.plan.batch, "classes": 100}
            parsed = Recipe.parse(table | {"gradient_share_every": 0}, "the benchmark")
            cohorts[f"sharing.{kind}_step_ms"] = Cohorts(self, parsed, self.plan.engine, peer=self.posterior(kind))
        timed = self.times(1e3 / count, {key: partial(found.step, count) for key, found in cohorts.items()})
        return {key: one | {"setup_s": cohorts[key].setup_s, "steps": count} for key, one in timed.items()}

    def sharing_predictions(self) -> Measured:
        """Time predictions of a point, a mean-field posterior and shared weights by sampling, in turn."""
        images = self.data.train.batch(torch.arange(self.plan.predicted), self.device)[0]
        calls = {
            f"sharing.predict_{kind}_s": partial(self.posterior(kind).predict, images, self.plan.draws)
            for kind in ("point", FIELD, *SAMPLINGS)
        }
        setup = {key: self.seconds(call) for key, call in calls.items()}
        timed = self.times(PREDICTED / self.plan.predicted, calls)
        about = {"images": len(images), "draws": self.plan.draws}
        return {key: one | {"setup_s": setup[key], **about} for key, one in timed.items()}

    def predictions(self, key: str, count: int, draws: int, scale: float, most: int = -1, **options: Any) -> Measured:
        """Time predictions of ``count`` images, after one that warms up; ``most`` stands in for `TOGETHER`."""
        images = self.data.train.batch(torch.arange(count), self.device)[0]
        recipe = self.recipe("vanilla", 1)
        posterior = build_peer(recipe.peers[0], recipe, self.data, 0, Path(), self.device)
        predict = partial(posterior.predict, images, draws, **options)
        kind, before = self.device.type, dict(prediction.TOGETHER)
        prediction.TOGETHER[kind] = most if most >= 0 else before[kind]
        try:
            setup = self.seconds(predict)
            timed = self.times(scale, {key: predict})[key]
        finally:
            prediction.TOGETHER.update(before)
        return {key: timed | {"setup_s": setup, "images": count, "draws": draws} | options}


def measurements(bench: Bench) -> list[Measurement]:
    """Return what is to be timed, the headlines first."""
    plan, found = bench.plan, list[Measurement]()

    def epochs(key: str, method: str, steps: int, engine: Name = plan.engine, count: int = 1, **options: Any) -> None:
        gpu = engine == "compiled" or count > 1
        found.append(((key,), gpu, lambda: bench.epochs(steps, engine, {key: bench.recipe(method, **options)}, count)))

    def predictions(key: str, *arguments: Any, **options: Any) -> None:
        found.append(((key,), "precision" in options, partial(bench.predictions, key, *arguments, **options)))

    def point_and_bayesian() -> Measured:
        point = bench.recipe("dml", point=True, terms="likelihood mutual")
        pairs = zip(RATIOS["bayesian_over_deterministic"], (bench.recipe("dml"), point), strict=True)
        return bench.epochs(plan.steps, plan.engine, dict(pairs))

    def loop_and_vmap(count: int) -> Measured:
        key = f"growth.small_batch.{count}"
        ways = [bench.predictions(key, count, plan.draws, 1e3, most=most)[key] for most in (0, 1 << 62)]
        return {key: {name: [way[name] for way in ways] for name in ways[0]}}

    epochs("pair_epoch_s", "ours", plan.steps)
    epochs("packed3_epoch_s", "ours", plan.steps, count=PACKED)
    found.append((RATIOS["bayesian_over_deterministic"], False, point_and_bayesian))
    found.append((("single_step_ms", *THEIRS), False, bench.against_bayesian_torch))
    images = PREDICTED / plan.predicted
    whole = plan.predicted, plan.draws, images * DRAWS / plan.draws
    predictions("predict_50x10k_s", *whole)
    predictions("predict_float32_50x10k_s", *whole, precision="float32")
    epochs("eager_pair_epoch_s", "ours", plan.few, "eager")
    epochs("compiled_pair_epoch_s", "ours", plan.few, "compiled")
    found.append(
        (tuple(f"distillation.{name.replace('-', '_')}_step_ms" for name in STUDENTS), False, bench.distillation)
    )
    found.append((tuple(f"distillation.predict_{way}_s" for way in MEMBERS), False, bench.members))
    shared: dict[str, tuple[Callable[[], Measured], Sequence[str]]] = {
        "sharing.clustering_s": (bench.clustering, [""]),
        "sharing.{}_draw_ms": (bench.draws, [FIELD, *SAMPLINGS]),
        "sharing.{}_step_ms": (bench.sharing_steps, list(LEARNING)),
        "sharing.predict_{}_s": (bench.sharing_predictions, ["point", FIELD, *SAMPLINGS]),
    }
    for name, (measure, kinds) in shared.items():
        found.append((tuple(name.format(kind) for kind in kinds), False, measure))
    for network in plan.networks:
        epochs(f"growth.network.{network}", "ours", plan.some, network=network)
    for peers in plan.peers:
        epochs(f"growth.peers.{peers}", "dml", plan.some, peers=peers)
    for draws in plan.growing:
        predictions(f"growth.draws.{draws}", plan.predicted, draws, images)
    for count in plan.small:
        found.append(((f"growth.small_batch.{count}",), False, partial(loop_and_vmap, count)))
    return found


def figures_of(keys: Sequence[str], measured: Measured, batch: int) -> dict[str, Any]:
    """Return the figures, dotted keys as tables, and notes that say why one is None."""
    flat: dict[str, Any] = {key: measured.get(key, {}).get("median") for key in keys}
    packed, predict = flat["packed3_epoch_s"], flat["predict_50x10k_s"]
    flat["bayesian_torch_step_ms"] = min((flat[key] for key in THEIRS if flat[key] is not None), default=None)
    flat["packed_network_step_ms"] = packed and packed * 1e3 / (EPOCH // batch) / (2 * PACKED)
    for key, (above, below) in RATIOS.items():
        flat[key] = None if flat[above] is None or flat[below] is None else flat[above] / flat[below]
    flat["predict_rate"] = predict and PREDICTED * DRAWS / predict
    for engine, key in MEMORY.items():
        flat[f"peak_memory_gib.{engine}"] = measured.get(key, {}).get("peak_memory_gib")
    found: dict[str, Any] = {"figures": {}, "notes": {}}
    for key, value in flat.items():
        *tables, last = key.split(".")
        reduce(lambda node, name: node.setdefault(name, {}), tables, found["figures"])[last] = value
        if value is None:
            missing = " and ".join(source for source in SOURCES.get(key, ()) if flat[source] is None)
            why = f"needs {missing}" if missing else NEEDS_GPU if key in SOURCES else "not measured"
            found["notes"][key] = measured.get(key, {}).get("failed", why)
    return found


def run(
    device: str, out: Path | None, only: Sequence[str], quick: bool, budget: float | None, reporter: Reporter
) -> tuple[dict[str, Any], Path]:
    """Measure, and write the record after every measurement; return it with its path.

    With ``only`` these figures are measured, and what else the file holds is kept if hardware, versions and settings
    are the same. ``quick`` is hardly anything of everything. After ``budget`` seconds no measurement is started.
    """
    began, place = time.perf_counter(), pick_device(device)
    usual = Plan() if place.type == "cuda" else CPU
    bench = Bench(place, replace(QUICK, engine=usual.engine, precision=usual.precision) if quick else usual)
    todo = measurements(bench)
    keys = [key for names, _, _ in todo for key in names]
    wanted = {key for name in only for key in _expand(name, keys)} if only else set(keys)
    about = environment(place) | {"settings": json.loads(json.dumps(asdict(bench.plan)))}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        about["versions"]["bayesian-torch"] = importlib.metadata.version("bayesian-torch")
    name = re.sub("[^a-z0-9]+", "-", (about["hardware"] if bench.on_gpu else platform.machine()).lower())
    name = name.removeprefix("nvidia-")
    path = out or Path("results") / f"bench-{name}{'-quick' if quick else ''}.json"
    before = read_json(path) if only and path.is_file() else {}
    measured: Measured = before["measurements"] if _same(before, about) else {}

    def write() -> dict[str, Any]:
        setup = {key: one["setup_s"] for key, one in measured.items() if "setup_s" in one}
        record = about | {"seconds": round(time.perf_counter() - began, 1)}
        record |= figures_of(keys, measured, bench.plan.batch) | {"setup_s": setup, "measurements": measured}
        storage.write_bytes(path, (json.dumps(record, indent=1) + "\n").encode())
        return record

    record: dict[str, Any] = {}
    for names, needs_gpu, measure in todo:
        if not wanted.intersection(names):
            continue
        late = budget is not None and time.perf_counter() - began >= budget
        try:
            if late or (needs_gpu and not bench.on_gpu):
                raise InputError(f"left out: the {budget:g} s were used up" if late else NEEDS_GPU)
            with torch.random.fork_rng([place] if bench.on_gpu else []):
                found = measure()
        except Exception as error:  # whatever it is, the rest goes on
            found = {key: {"failed": _sentence(error)} for key in names}
        measured |= found
        record = write()
        for key in names:
            reporter.headline(f"{record['seconds']:7.1f} s  {key} {found[key].get('median', found[key].get('failed'))}")
    return record, path


def _same(before: Mapping[str, Any], about: Mapping[str, Any]) -> bool:
    """Return whether a record was made under the same conditions; a setting that it does not know concerns others."""
    known = before.get("settings", {})
    settings = {key: value for key, value in about["settings"].items() if key in known}
    return all(before.get(key) == value for key, value in {**about, "settings": settings}.items())


def _expand(name: str, keys: Sequence[str]) -> list[str]:
    """Return what has to be timed for a figure, or for all figures below a name."""
    known = [key for key in (*keys, *SOURCES) if key == name or key.startswith(f"{name}.")]
    if not known:
        raise InputError(f"there is no figure '{name}'{nearest(name, [*keys, *SOURCES, 'growth'])}")
    found = [[key] if key in keys else [k for source in SOURCES[key] for k in _expand(source, keys)] for key in known]
    return [key for part in found for key in part]


def _sentence(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return text if isinstance(error, InputError) else f"{type(error).__name__}: {text}"
