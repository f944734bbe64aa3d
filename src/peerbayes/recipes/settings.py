"""The tables that a recipe is made of: data, peers with their posteriors, teachers, stages and evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from peerbayes.data.transforms.augment import AUGMENTATIONS
from peerbayes.errors import InputError, nearest
from peerbayes.posteriors.kinds import PosteriorKind, PosteriorOptions
from peerbayes.schema import NotNegativeFloat, NotNegativeInt, PositiveFloat, PositiveInt, Strict, fault, nested
from peerbayes.terms.definition import find as find_term

CUSTOM = "custom"  # the network of a peer that came from Python, not from a recipe


class Text(Strict):
    """How texts become token numbers; see `peerbayes.data.TextOptions`."""

    tokens: Literal["words", "characters", "pieces"] = "words"
    ngrams: PositiveInt = 1
    length: PositiveInt | None = None
    buckets: PositiveInt = 20_000
    vocabulary: PositiveInt = 30_000
    vectors: str = ""
    tokenizer: str = ""


class Data(Strict):
    """Which data, and how it is fed.

    Attributes:
        name: a data set, an ``.npz`` file or an image folder.
        classes: refuse data with another number of classes.
        batch_size: images in a batch, over all processes.
        augment: names of augmentations, in the order in which they are applied.
        validation: images (or fraction) of the training split kept for validation; ``auto`` takes the data's own split,
            or else a tenth; ``half`` takes half of its own, where the other half has to be the test split.
        size: image size for folders.
        stats: normalise colour images by ``imagenet``'s mean and deviation instead of the data's own.
        text: how texts become token numbers, where the data are texts.
    """

    name: str = "digits"
    classes: PositiveInt | None = None
    batch_size: PositiveInt = 128
    augment: list[str] = []
    validation: int | float | Literal["auto", "half"] = 0
    size: PositiveInt | None = None
    stats: Literal["imagenet"] | None = None
    text: Text | None = None

    @field_validator("augment")
    @classmethod
    def _known_augmentations(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in AUGMENTATIONS:
                raise ValueError(f"there is no augmentation '{name}'{nearest(name, AUGMENTATIONS)}")
        if len(set(names)) < len(names):  # the second one has the noise of the first
            raise ValueError(f"each augmentation may be named once, not {', '.join(names)}")
        return names


class Peer(Strict):
    """A posterior over a network.

    Attributes:
        name: letters, digits, ``_`` and ``-``; names its files and its rows in tables.
        network: a name, ``timm/NAME``, or ``package.module:function``.
        posterior: a table whose ``kind`` says what else it may hold.
        start_from: where its weights begin: a recipe (trained first if need be), a run folder or a file of weights.
        new_head: whether a new head takes the place of a file's that has another number of classes; by default one does
            in networks of timm.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    network: str
    posterior: SerializeAsAny[PosteriorOptions]
    start_from: str | None = None
    new_head: bool | None = None

    @field_validator("posterior", mode="plain")
    @classmethod
    def _of_its_kind(cls, given: Any) -> PosteriorOptions:
        if isinstance(given, PosteriorOptions):
            return given
        if not isinstance(given, dict):
            raise PydanticCustomError("table", "input should be a table such as {kind = 'mean_field'}")
        table = PosteriorOptions
        if "kind" in given:
            try:
                table = PosteriorKind.of_kind(str(given["kind"])).recipe_options()
            except InputError as error:
                raise fault(str(error), "kind") from None
        try:
            return table.model_validate(given)
        except ValidationError as error:
            raise nested(error, None, given) from None

    @model_validator(mode="after")
    def _start_is_given(self) -> Peer:
        # A network of one's own comes with its anchor, or its codebook.
        if self.network != CUSTOM and self.start_from is None and (why := self.posterior.needs_start()):
            raise ValueError(f"peer '{self.name}' {why}")
        return self


class TeacherOptions(Strict):
    """Trained networks that the peers learn from, and that do not learn.

    Attributes:
        runs: recipes (trained first if need be), run folders, or weights files of runs.
        draws: of each Bayesian teacher, new ones in every step.
        peers: names of those that teach; all peers of the runs, if it is not given.
    """

    runs: Annotated[list[str], Field(min_length=1)]
    draws: PositiveInt = 1
    peers: Annotated[list[str], Field(min_length=1)] | None = None

    def has(self, name: str) -> bool:
        """Return whether a peer of that name teaches."""
        return self.peers is None or name in self.peers


Kind = Literal["none", "gaussian", "ods", "conf_ods", "tdiv", "tdiv_sdiv", "bald"]


class Perturb(Strict):
    """Steps of the images, of the size of noise of 1/255 a pixel; see `peerbayes.engine.perturbation.Perturbation`.

    Attributes:
        kind: ``gaussian`` noise; along the gradient of a random mix of a teacher's probabilities (``ods``), times its
            confidence (``conf_ods``); to where two teachers differ (``tdiv``) and the two members of the student that
            learn from them agree (``tdiv_sdiv``); or to where all teachers disagree (``bald``). ``none`` stands for no
            such table.
        temperature: of the teacher in ``ods`` and ``conf_ods``.
    """

    kind: Kind
    temperature: PositiveFloat = 1.0


class Mix(Strict):
    """Mix images of a batch in pairs, and learn both labels by their shares; see `peerbayes.data.transforms.mix.Mixer`.

    Attributes:
        kind: ``mixup`` averages two images, ``cutmix`` puts a box of one into the other. ``none`` stands for no such
            table.
        alpha: of Beta(alpha, alpha), from which the share of an image is drawn.
    """

    kind: Literal["mixup", "cutmix", "none"]
    alpha: PositiveFloat = 1.0


class Optimizer(Strict):
    """An optimiser of torch.optim, or ``ivon``; see `peerbayes.engine.ivon.Ivon`.

    Attributes:
        name: which optimiser; AdamW decays weights apart from the gradient, IVON learns the Gaussians of ``mean_field``
            posteriors by natural gradients, without a `kl` term: its decay is the prior.
        lr: learning rate.
        momentum: of SGD, and of IVON (its β₁).
        nesterov: Nesterov's momentum.
        weight_decay: of means and of what is not Bayesian; scales do not decay. Of IVON it is the precision of the
            prior, divided by ``ess``.
        clip: largest norm of a peer's gradient; longer ones are shortened to it. 0 for no limit.
        scale_lr: learning rate of scales (ρ, and Cholesky factors), where it is another one.
        scale_space: ``sigma`` takes steps of σ itself, not of ρ, by gradients of σ, and at most halves or doubles σ in
            one. σ = softplus(ρ) is flat where σ is small: SGD on ρ moves a σ of 1e-3 by a millionth of a step of σ.
        ess: of IVON: how many images the posterior has seen; by default those of the training split.
        beta2: of IVON: how slowly scales follow; by default 0.99999.
    """

    name: Literal["adam", "adamw", "sgd", "ivon"] = "adam"
    lr: PositiveFloat = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    nesterov: bool = False
    weight_decay: NotNegativeFloat = 0.0
    clip: NotNegativeFloat = 0.0
    scale_lr: PositiveFloat | None = None
    scale_space: Literal["sigma"] | None = None
    ess: PositiveFloat | None = None
    beta2: Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _ivon_by_itself(self) -> Optimizer:
        if self.name != "ivon":
            for key in ("ess", "beta2"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key} is of ivon, but the optimiser is {self.name}; leave out one of them")
            return self
        if not self.weight_decay:
            raise ValueError("ivon needs a weight_decay above 0: it is the precision of its prior")
        for key in ("clip", "scale_lr", "scale_space"):
            if getattr(self, key):
                raise ValueError(f"{key} is not for ivon, which makes scales of its Hessian; leave it out")
        return self

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Optimizer:
        if self.nesterov and (self.name != "sgd" or not self.momentum):
            raise ValueError("nesterov needs sgd with a momentum above 0")
        return self


class Stage(Strict):
    """Epochs with an optimiser, a learning-rate schedule and terms. Optimiser and learning rate start anew.

    Attributes:
        epochs: passes over the training split.
        optimizer: a table, see `Optimizer`.
        lr_milestones: epochs of this stage after which the learning rate is multiplied by ``lr_factor``.
        lr_schedule: ``milestones``, or ``cosine`` to 0 over the stage, by step.
        lr_factor: what the learning rate is multiplied by at a milestone.
        warmup: epochs of linear warm-up.
        mix: mix images in pairs, before they are perturbed.
        perturb: steps of the images before anybody sees them.
        draws: of each stochastic peer in a step, averaged in the loss; 1 by default. Each costs a forward and a
            backward pass.
        freeze_rest: leave alone what is not Bayesian: batch-norm's scales and shifts, say. Its statistics still move.
        terms: options by term name; the loss is their sum.
    """

    epochs: PositiveInt
    optimizer: Optimizer = Optimizer()
    lr_schedule: Literal["milestones", "cosine"] = "milestones"
    lr_milestones: list[PositiveInt] = []
    lr_factor: PositiveFloat = 0.1
    warmup: NotNegativeFloat = 0.0
    mix: Mix | None = None
    perturb: Perturb | None = None
    draws: PositiveInt | None = None
    freeze_rest: bool = False
    terms: dict[str, dict[str, Any]]

    @property
    def layers(self) -> list[str]:
        """Layers whose features the terms look at, each once."""
        return list(dict.fromkeys(layer for options in self.terms.values() for layer in options.get("layers", [])))

    @model_validator(mode="after")
    def _ivon_has_its_prior(self) -> Stage:
        for name in ("kl", "weight_diversity") if self.optimizer.name == "ivon" else ():
            if name in self.terms:
                raise ValueError(f"ivon learns scales from draws alone: remove term '{name}'")
        return self

    @field_validator("mix", "perturb")
    @classmethod
    def _none(cls, given: Mix | Perturb | None) -> Mix | Perturb | None:
        # A line such as --set can change a table, but not take it away.
        return None if given is None or given.kind == "none" else given

    @field_validator("terms")
    @classmethod
    def _valid_terms(cls, given: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if not given:
            raise ValueError("a stage needs at least one term")
        terms = {}
        for name, options in given.items():
            try:
                terms[name] = find_term(name).schema.model_validate(options).model_dump(exclude_none=True)
            except ValidationError as error:
                raise nested(error, name, options) from None
        return terms


class Evaluation(Strict):
    """How the peers are evaluated.

    Attributes:
        draws: draws averaged by stochastic posteriors.
        test_every: epochs between two looks at the test split during training, for curves; 0 for none.
        last_epochs: also report the mean over the last so many epochs, as some papers do; 0 for none. These epochs are
            evaluated on the test split whatever ``test_every`` is.
        ece_bins: bins of equal width of the expected calibration error.
        keep: the peers as they are at the ``last`` epoch, or at the ``best`` one of the last stage by accuracy on the
            validation split, each peer by itself.
        out_of_distribution: data sets whose images the peers should be unsure of.
        retention: fractions of images kept, by lowest entropy and by lowest disagreement.
    """

    draws: PositiveInt = 50
    test_every: NotNegativeInt = 0
    last_epochs: NotNegativeInt = 0
    ece_bins: PositiveInt = 15
    keep: Literal["last", "best"] = "last"
    out_of_distribution: list[str] = []
    retention: list[Annotated[float, Field(gt=0, le=1)]] = [0.2, 0.4, 0.6, 0.8]
