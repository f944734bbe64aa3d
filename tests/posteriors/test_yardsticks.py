"""What people would use instead: SWAG, Laplace's approximation of the last layer, and MC dropout."""

import copy
import functools
import warnings

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from learners import stopped_at
from peerbayes.api.compressing import compress
from peerbayes.api.distilling import distill
from peerbayes.api.fitting import fit, train
from peerbayes.data import ArraySplit
from peerbayes.engine.teachers import Teachers, run_functional
from peerbayes.errors import InputError
from peerbayes.math.noise import Address, uniform_from
from peerbayes.posteriors import Laplace, MCDropout, Point, Posterior, Swag
from peerbayes.posteriors.laplace import best_precision
from peerbayes.posteriors.mc_dropout import _masked
from peerbayes.reports.evaluating import evaluate
from peerbayes.runs.run import Run

HERE = Address(seed=3, owner="peer-1", stream="draw", number=0)
KINDS = {"swag": functools.partial(Swag, rank=4), "laplace": Laplace, "mc_dropout": MCDropout}


def small(dropout=0.5):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(16, 3)
    )


def split(count=60, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return ArraySplit(torch.rand(count, 1, 4, 4, generator=generator), torch.arange(count) % 3)


def random_walk(swag, epochs):
    """Let weights walk as epochs of SGD would; return what they were."""
    generator, walked = torch.Generator().manual_seed(7), []
    for _ in range(epochs):
        for parameter in (swag.mean, swag.rest):
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        walked.append(torch.cat([swag.mean, swag.rest]).detach().clone())
        swag.end_epoch({}, lambda _name: None)
    return torch.stack(walked)


def ready(kind):
    """Return a posterior of a kind that has learnt as far as its draws differ."""
    posterior = KINDS[kind](small(), seed=3, name="a").eval()
    if kind == "swag":
        random_walk(posterior, 6)
    posterior.conclude(split(), [])
    return posterior


# ---- what they have in common -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_is_a_function_of_its_address_and_a_file_has_the_same_draws(kind, tmp_path):
    posterior = ready(kind)
    one, again, other = (posterior.draw(HERE.at(number)).flat for number in (5, 5, 6))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    posterior.save(tmp_path / "weights.safetensors")
    read = Posterior.load(tmp_path / "weights.safetensors", small())
    assert (read.kind, read.stochastic, read.digest()) == (kind, True, posterior.digest())
    assert torch.equal(read.draw(HERE.at(5)).flat, one)
    (slope,) = torch.autograd.grad(posterior.draw(HERE).flat.sum(), posterior.mean)
    assert (slope == 1).all()
    images = split(9, seed=4).batch(torch.arange(9), torch.device("cpu"))[0]
    found, expected = read.predict(images, 6), posterior.predict(images, 6)
    assert torch.equal(found.probabilities, expected.probabilities)
    assert found.disagreement.max() > 1e-4
    by_hand = torch.stack([posterior(images, found.replay(number)).softmax(1) for number in range(6)]).mean(0)
    torch.testing.assert_close(found.probabilities, by_hand, atol=1e-5, rtol=0)
    one_by_one = posterior.predict(images.repeat(100, 1, 1, 1)[:700], 6).probabilities[:9]  # too many for vmap
    torch.testing.assert_close(one_by_one, by_hand, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_before_training_has_ended_it_is_the_point_that_learns(kind):
    point, posterior = Point(small()).eval(), KINDS[kind](small()).eval()
    images = split(9).batch(torch.arange(9), torch.device("cpu"))[0]
    assert torch.equal(posterior(images), point(images))
    for part in (posterior.training_weights(None)[0], posterior.mean):
        assert torch.equal(part[part != 0], point.mean[point.mean != 0])
    assert posterior.kl().item() == 0
    if kind != "mc_dropout":
        assert not posterior.stochastic
        assert torch.equal(posterior.draw(HERE).flat, posterior.mean)
        assert (posterior.std == 0).all()
    plain = posterior.materialise()
    assert plain.state_dict().keys() == small().state_dict().keys()
    assert torch.equal(plain(images), point(images))


@pytest.mark.parametrize("kind", KINDS)
def test_its_draws_teach(kind):
    posterior = ready(kind)
    teachers = Teachers([posterior], draws=2, seed=5)
    images = split(9).batch(torch.arange(9), torch.device("cpu"))[0]
    first, second = teachers.logits(run_functional, images, teachers.tensors(torch.tensor(3)), None)
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, posterior(images, posterior.draw(Address(5, "teacher0", "draw", 6))))


# ---- SWAG -------------------------------------------------------------------------------------------------------


def test_swag_is_the_gaussian_of_the_last_epochs():
    swag = Swag(small(), rank=4)
    walked = random_walk(swag, 7)[3:]
    swag.settle_gaussian()
    size, middle = swag.layout.size, walked.double().mean(0)
    torch.testing.assert_close(torch.cat([swag.mean, swag.rest]).double(), middle, atol=1e-6, rtol=0)
    off = walked.double()[:, :size] - middle[:size]
    covariance = 0.5 * torch.diag(off.square().mean(0)) + off.T @ off / (2 * 3)
    torch.testing.assert_close(swag.std.double(), covariance.diag().sqrt(), atol=1e-6, rtol=1e-5)
    draws = torch.stack([swag.draw(HERE.at(number)).flat for number in range(20_000)]).double()
    spread = covariance.diag().sqrt()
    error = (draws.T.cov() - covariance) / torch.outer(spread, spread)
    assert error.abs().max() < 0.05  # 1/√20,000 is .007: seven standard errors of the largest of 12,000
    assert ((draws.mean(0) - middle[:size]) / spread).abs().max() < 0.04


def test_swag_estimates_statistics_under_its_draws():
    swag, data = Swag(small(), rank=3), split(600)
    random_walk(swag, 3)
    swag.conclude(data, [])
    inputs = data.batch(torch.arange(600), torch.device("cpu"))[0]
    found = []
    for number in range(400):
        weights = swag.draw(HERE.at(number))
        found.append(nn.functional.conv2d(inputs, weights["0.weight"], weights["0.bias"]).mean((0, 2, 3)))
    expected, error = torch.stack(found).mean(0), torch.stack(found).std(0)
    assert ((swag.network.get_buffer("1.running_mean") - expected).abs() < 4 * error).all()  # of two batches
    assert swag.network.get_buffer("1.num_batches_tracked") == 2


def test_swag_that_learns_again_begins_anew():
    swag = Swag(small(), rank=4)
    random_walk(swag, 6)
    swag.settle_gaussian()
    walked = random_walk(swag, 2)
    assert not swag.stochastic
    swag.settle_gaussian()
    torch.testing.assert_close(swag.mean, walked[:, : swag.layout.size].mean(0))


def test_swag_refuses_what_has_no_spread():
    with pytest.raises(InputError, match="rank is 1, expected at least 2"):
        Swag(small(), rank=1)
    swag = Swag(small(), name="one")
    random_walk(swag, 1)
    with pytest.raises(InputError, match="peer 'one': swag has kept 1 sets of weights"):
        swag.conclude(split(), [])


# ---- Laplace ----------------------------------------------------------------------------------------------------


@functools.cache
def trained():
    network, data = small(dropout=0.0).eval(), split()
    inputs, labels = data.batch(torch.arange(60), torch.device("cpu"))
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), labels).backward()
        optimizer.step()
    return network, inputs.clone(), labels.clone()


def logit_covariance(laplace, inputs):
    """Return the covariance of the logits (N, C, C), in closed form, of what `draw` is made of."""
    features = nn.Sequential(*list(laplace.materialise())[:-1])(inputs)
    variance = (features @ laplace.rotation_in).square() @ laplace.scale.square().T + laplace.bias_scale.square()
    return torch.einsum("ck,nk,dk->ncd", laplace.rotation_out, variance, laplace.rotation_out).detach()


def concluded(**options):
    network, inputs, labels = trained()
    laplace = Laplace(network, **options).eval()
    laplace.conclude(ArraySplit(inputs, labels), [])
    return laplace


def test_laplace_is_that_of_laplace_torch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries that it brings use what is deprecated
        oracle_of = pytest.importorskip("laplace").Laplace
        network, inputs, labels = trained()
        oracle = oracle_of(
            copy.deepcopy(network), "classification", subset_of_weights="last_layer", hessian_structure="kron"
        )
        oracle.fit(DataLoader(TensorDataset(inputs, labels), batch_size=60))

        def evidence(log_precision):
            return -float(oracle.log_marginal_likelihood(torch.tensor(10.0**log_precision)))

        best = 10.0 ** minimize_scalar(evidence, bounds=(-4, 4), method="bounded", options={"xatol": 1e-6}).x
        for given in (None, 0.3):
            oracle.prior_precision = torch.tensor(best if given is None else given)
            mean, covariance = oracle._glm_predictive_distribution(inputs[:9])
            probit = oracle(inputs[:9], pred_type="glm", link_approx="probit")
            laplace = concluded(prior_precision=given)
            assert laplace.precision.item() == pytest.approx(oracle.prior_precision.item(), rel=1e-3)
            torch.testing.assert_close(logit_covariance(laplace, inputs[:9]), covariance, atol=1e-4, rtol=1e-3)
            own = laplace(inputs[:9])
            torch.testing.assert_close(own, mean, atol=1e-5, rtol=0)
            # Its predictions, in closed form, from our covariance.
            variance = logit_covariance(laplace, inputs[:9]).diagonal(dim1=1, dim2=2)
            ours = (own / (1 + torch.pi / 8 * variance).sqrt()).softmax(1)
            torch.testing.assert_close(ours, probit, atol=1e-4, rtol=0)


def test_laplace_has_the_curvature_of_the_loss():
    """With one input, where a Kronecker product is exact, the precision is the Hessian that autograd finds."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    one = ArraySplit(torch.rand(1, 1, 2, 2), torch.tensor([1]))
    laplace = Laplace(network, prior_precision=0.7)
    laplace.conclude(one, [])
    x, weight, bias = one.batch(torch.arange(1), torch.device("cpu"))[0].flatten(), *network[1].parameters()

    def loss(flat):
        return nn.functional.cross_entropy((flat.view(3, 4) @ x + bias)[None], torch.tensor([1]))

    hessian = torch.autograd.functional.hessian(loss, weight.detach().flatten()) + 0.7 * torch.eye(12)
    root = torch.kron(laplace.rotation_out, laplace.rotation_in) * laplace.scale.flatten()
    torch.testing.assert_close(root @ root.T, torch.linalg.inv(hessian), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(laplace.std[:12], torch.linalg.inv(hessian).diag().sqrt(), atol=1e-5, rtol=1e-4)


def test_draws_of_laplace_have_its_covariance():
    laplace, inputs = concluded(prior_precision=0.5), trained()[1][:3]
    draws = torch.stack([laplace(inputs, laplace.draw(HERE.at(number))) for number in range(4000)]).detach()
    expected = logit_covariance(laplace, inputs)
    for place in range(3):
        covariance = draws[:, place].T.cov()
        scale = expected[place].diag().sqrt()
        assert ((covariance - expected[place]) / torch.outer(scale, scale)).abs().max() < 0.1
    first, second = laplace.draw(HERE), laplace.centre()
    assert all(torch.equal(first[name], second[name]) for name in first if not name.startswith("5."))


def test_the_precision_of_the_prior_has_the_largest_marginal_likelihood():
    torch.manual_seed(0)
    curvature, weights = torch.rand(50).double() * 30, torch.randn(50).double() * 0.3

    def evidence(log_tau):
        tau = 10.0**log_tau
        return 0.5 * float((1 + curvature / tau).log().sum() + tau * weights.square().sum())

    best = minimize_scalar(evidence, bounds=(-5, 5), method="bounded", options={"xatol": 1e-9}).x
    assert best_precision(curvature, weights) == pytest.approx(10.0**best, rel=1e-5)


class Ends(nn.Module):
    """A network that goes on after its last linear layer."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return 2 * self.head(x.flatten(1))


def test_laplace_refuses_networks_that_do_not_end_in_a_linear_layer():
    with pytest.raises(InputError, match=r"needs a last layer that is an nn\.Linear, and Sequential has none"):
        Laplace(nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()))
    with pytest.raises(InputError, match="'0' is none"):
        Laplace(nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten(), nn.Linear(3, 3)), layer="0")
    laplace = Laplace(Ends())
    with pytest.raises(InputError, match="logits are not what 'head' returns"):
        laplace.training_pass(torch.rand(2, 1, 4, 4), laplace.mean, None)


# ---- MC dropout -------------------------------------------------------------------------------------------------


def test_masks_leave_out_units_at_their_rate_and_keep_the_mean():
    stays = torch.stack([uniform_from(torch.tensor([key]), 64) for key in range(2000)])
    assert abs(stays.mean() - 0.5) < 0.003
    assert (stays.T.corrcoef() - torch.eye(64)).abs().max() < 0.12  # 1/√2000 is .022
    for p in (0.2, 0.5):
        posterior = MCDropout(nn.Sequential(nn.Dropout(p), nn.Linear(8, 1, bias=False)), seed=1).eval()
        posterior.layout.views(posterior.mean.data)["1.weight"].copy_(torch.eye(8)[:1])
        logits = torch.stack([posterior(torch.ones(1, 8), posterior.draw(HERE.at(n))) for n in range(3000)]).flatten()
        assert {round(value, 4) for value in logits.tolist()} == {0.0, round(1 / (1 - p), 4)}
        assert abs(logits.mean() - 1) < 0.1
        assert abs((logits == 0).float().mean() - p) < 0.04


def test_layers_of_dropout_have_masks_of_their_own_and_channels_go_as_one():
    posterior = MCDropout(nn.Sequential(nn.Dropout2d(0.5), nn.Dropout(0.5), nn.Conv2d(32, 1, 1))).eval()
    weights = posterior.draw(HERE)
    assert weights["0.key"] != weights["1.key"]
    assert (posterior.mean[: posterior.layout.size] != 0).sum() == 33  # of the convolution alone

    def kept(layer):
        masked = copy.deepcopy(posterior.network[layer])
        masked.key = nn.Parameter(weights[f"{layer}.key"].detach().clone())
        return masked(torch.ones(2, 32, 3, 3)) != 0

    channels, units = kept(0), kept(1)
    assert torch.equal(channels.all((2, 3)), channels.any((2, 3)))
    assert not torch.equal(units.all((2, 3)), units.any((2, 3)))
    assert torch.equal(units[0], units[1])


def test_it_learns_as_its_network_does_and_keys_stay_where_they_are(tmp_path):
    overrides = ["stages.0.epochs=2", "data.validation=0", "stages.0.optimizer.weight_decay=0.1"]
    runs = [
        fit(
            {"net": kind(small(), name="net")},
            data=made(),
            recipe="plain",
            run=tmp_path / kind.kind,
            overrides=overrides,
        )
        for kind in (Point, MCDropout)
    ]
    point, dropout = (run["net"] for run in runs)
    masks = [dropout.layout.views(dropout.mean)[key] for key in dropout.keys]
    assert len(masks) == 1
    assert masks[0] == 0
    learnt, expected = dropout.materialise().state_dict(), point.materialise().state_dict()
    assert learnt.keys() == expected.keys()
    assert all(torch.equal(learnt[name], expected[name]) for name in expected)


def test_networks_without_dropout_are_refused():
    with pytest.raises(InputError, match=r"needs a network with nn\.Dropout layers of a rate above 0, and Sequential"):
        MCDropout(small(dropout=0.0))
    with pytest.raises(InputError, match="'0' is a AlphaDropout"):
        MCDropout(nn.Sequential(nn.AlphaDropout(), nn.Linear(2, 2)))
    fused = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    posterior = MCDropout(nn.Sequential(nn.Flatten(2), fused, nn.Flatten(), nn.Linear(16, 3)))
    with pytest.raises(InputError, match=r"does not call its dropout '1\.dropout' when it predicts"):
        posterior.requires_grad_(False).training_pass(torch.rand(2, 4, 2, 2), posterior.mean, None)


# ---- by the verbs -----------------------------------------------------------------------------------------------


def made():
    generator = torch.Generator().manual_seed(2)
    pixels = (torch.rand(90, 4, 4, generator=generator) * 255).to(torch.uint8)
    return pixels, torch.arange(90) % 3


FEW = ["stages.*.epochs=1", "peers.0.posterior.smallest=1", "peers.0.posterior.top=0"]
SHORT = ["data.batch_size=32", "stages.*.epochs=3", "stages.*.warmup=0"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_fitted_judged_distilled_and_compressed(kind, tmp_path):
    posterior = KINDS[kind](small(), name="net")
    run = fit({"net": posterior}, data=made(), recipe="plain", run=tmp_path / "run", overrides=SHORT)
    assert posterior.stochastic
    record = evaluate(run, draws=5)
    assert record["peers"][0]["disagreement"] > 0
    again = Run(tmp_path / "run", {"net": small()})
    assert again["net"].digest() == posterior.digest()
    student = distill([run["net"]], into=small(), data=made(), run=tmp_path / "one", overrides=["stages.0.epochs=1"])
    assert type(student) is nn.Sequential
    shared = compress(run["net"], components=4, data=made(), run=tmp_path / "few", overrides=FEW)
    assert shared.kind == "shared"
    assert (tmp_path / "few-stage1").exists() == (kind != "swag")  # of which every weight has a scale


@pytest.mark.parametrize("kind", ["swag", "laplace"])
def test_a_recipe_names_it_and_a_resumed_run_is_the_same(kind, tmp_path):
    overrides = [f"peers.0.posterior={{ kind = '{kind}' }}", "peers.0.network=mlp", "data.batch_size=500"]
    overrides += ["stages.0.epochs=4", "stages.0.warmup=0"]
    whole = train("plain", tmp_path / "whole", overrides=overrides)
    with stopped_at(7):
        train("plain", tmp_path / "cut", overrides=overrides, checkpoint_every=2)
    cut = train("plain", tmp_path / "cut", overrides=overrides, resume=True)
    name = next(iter(whole))
    assert cut[name].digest() == whole[name].digest()
    assert whole[name].stochastic
    assert evaluate(whole, draws=5)["peers"] == evaluate(cut, draws=5)["peers"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_it_started_from_as_a_point_does(kind):
    source = Point(trained()[0])
    assert KINDS[kind](small(), start_from=source).provenance == Point(small(), start_from=source).provenance


def test_keys_of_masks_lie_where_the_network_lies():
    """A network on a GPU, which has no second device here: on one without numbers they would be on the CPU."""
    assert {parameter.device.type for parameter in _masked(small(dropout=0.5).to("meta")).parameters()} == {"meta"}


@pytest.mark.parametrize("kind", ["laplace", "mc_dropout"])
def test_it_starts_from_a_trained_run_without_training(kind, tmp_path):
    overrides = ["peers.0.network=mlp_dropout", "stages.0.epochs=2", "stages.0.warmup=0"]
    plain = train("plain", tmp_path / "plain", overrides=overrides)
    name = next(iter(plain))
    there = [
        f"peers.0.start_from='{tmp_path}/plain'",
        f"peers.0.posterior={{ kind = '{kind}' }}",
        "peers.0.network=mlp_dropout",
        "stages=[]",
        "evaluation.draws=20",
    ]
    run = train("plain", tmp_path / "later", overrides=there)
    made, expected = (one[name].materialise().state_dict() for one in (run, plain))
    assert all(torch.equal(made[part], tensor) for part, tensor in expected.items())
    assert run[name].stochastic
    assert kind != "laplace" or (run[name].precision > 0).item()
    again = train("plain", tmp_path / "later", overrides=there, resume=True)  # which finds that it is whole
    assert again[name].digest() == run[name].digest()


def test_from_python_a_recipe_without_stages_makes_it_of_a_network(tmp_path):
    network, *_ = trained()
    laplace = Laplace(network, name="net")
    run = fit({"net": laplace}, data=made(), recipe="from-checkpoint", run=tmp_path / "run", overrides="stages=[]")
    assert run["net"].stochastic
    assert torch.equal(run["net"].mean, Laplace(network).mean)


# ---- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch's compiler warns while it is imported
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_captured_runs_end_as_eager_ones_do(kind, precision, tmp_path):
    found = {}
    for engine in ("eager", "captured"):
        posterior = KINDS[kind](small(dropout=1e-6 if kind == "mc_dropout" else 0.0), name="net").to("cuda")
        run = fit(
            {"net": posterior},
            data=made(),
            recipe="plain",
            run=tmp_path / engine,
            overrides=SHORT,
            engine=engine,
            precision=precision,
        )
        assert run.about["engine"] == engine
        assert run["net"].stochastic
        found[engine] = run["net"]
    loose = {"atol": 0.05, "rtol": 0.1} if precision == "bfloat16" else {"atol": 1e-4, "rtol": 1e-3}
    for part in ("mean", "rest"):
        torch.testing.assert_close(getattr(found["captured"], part), getattr(found["eager"], part), **loose)
    if precision == "float32":
        torch.testing.assert_close(found["captured"].std, found["eager"].std, atol=1e-4, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_predictions_on_a_gpu_are_those_of_the_cpu(kind):
    posterior, images = ready(kind), split(700, seed=4).batch(torch.arange(700), torch.device("cpu"))[0]
    expected = posterior.predict(images, 8)
    on_gpu = copy.deepcopy(posterior).to("cuda")
    for precision, atol in (("float32", 1e-4), ("auto", 1e-2)):
        for part in (slice(0, 700), slice(0, 5)):  # one draw after another, and all at once
            found = on_gpu.predict(images[part], 8, precision=precision).probabilities.cpu()
            torch.testing.assert_close(found, expected.probabilities[part], atol=atol, rtol=0)
    fresh = KINDS[kind](small(), seed=3, name="a").to("cuda").eval()
    if kind == "swag":
        random_walk_on(fresh)
    fresh.conclude(split(), [])
    torch.testing.assert_close(fresh.std.cpu(), posterior.std, atol=1e-4, rtol=1e-3)


def random_walk_on(swag):
    """Walk as `random_walk` does, on another device."""
    walked = Swag(small(), rank=4)
    steps = random_walk(walked, 6)
    for row in steps.to(swag.device):
        mean, rest = row.split([swag.layout.size, swag.rest_layout.size])
        swag.mean.data.copy_(mean)
        swag.rest.data.copy_(rest)
        swag.end_epoch({}, lambda _name: None)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", KINDS)
def test_draws_teach_a_captured_student(kind, tmp_path):
    teacher = ready(kind).to("cuda")
    student = distill([teacher], into=small(0.0), data=made(), run=tmp_path / "one", overrides=["stages.0.epochs=2"])
    assert Run(tmp_path / "one", {"student": small(0.0)}).about["engine"] == "captured"
    assert all(parameter.isfinite().all() for parameter in student.parameters())
