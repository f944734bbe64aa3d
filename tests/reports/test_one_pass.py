"""Bayesian peers in one pass: what their mean weights predict, each and as one."""

import pytest
import torch
import torch.nn.functional as F

import peerbayes as pb
from peerbayes.inference.batch_norm import recalibrate

SHORT = ["peers.*.network=resnet8", "stages.0.epochs=2", "stages.0.warmup=0", "evaluation.draws=2", "data.name=digits"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-pass") / "run"
    return pb.train("peers", folder, overrides=[*SHORT, "data.validation=100"], device="cpu")


def test_mean_weights_are_judged_as_plain_networks_each_and_together(run):
    record = pb.evaluate(run, averaged=True, device="cpu")
    test, train = run.data().test, run.data().train
    labels, images = test.labels, test.images.float() / 255
    together = {}
    for peer in record["peers"]:
        assert list(peer["averaged"]) == ["mean", "mean, recalibrated"]
        plain = run[peer["name"]].materialise().eval()
        for way, figures in peer["averaged"].items():
            if way != "mean":
                recalibrate(plain, train, augment=run.recipe.data.augment)
            with torch.no_grad():
                log_p = plain(images).log_softmax(-1).double()
            assert figures["nll"] == pytest.approx(float(F.nll_loss(log_p, labels)), rel=1e-4)
            assert figures["cnll"] != peer["cnll"]  # a temperature of its own
            together.setdefault(way, []).append(log_p.exp())
    for way, figures in record["ensemble"]["averaged"].items():
        mean = torch.stack(together.pop(way)).mean(0)
        assert figures["nll"] == pytest.approx(float(F.nll_loss(mean.log(), labels)), rel=1e-4)
        assert figures["accuracy"] == pytest.approx(float((mean.argmax(-1) == labels).double().mean()))
    assert not together
    text = pb.reports.text_table([record])
    assert "in one pass (mean):" in text
    assert "in one pass (mean, recalibrated):" in text
