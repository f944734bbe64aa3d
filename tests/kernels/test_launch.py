"""Convolution, bias, residual and ReLU in one: against torch's own convolution in double precision."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from peerbayes.kernels import launch as kernels
from peerbayes.kernels.launch import FusedConv, can_fuse, conv_relu

# channels, out, kernel, stride, padding, (images, height, width): every value of each at least twice; the pixels of the
# result are no multiple of a block, but in the last.
SHAPES = [
    (1, 3, (1, 1), (1, 1), (0, 0), (1, 7, 9)),
    (1, 16, (3, 3), (1, 1), (1, 1), (3, 7, 9)),
    (1, 64, (5, 5), (2, 2), (2, 2), (2, 7, 9)),
    (2, 20, (3, 1), (2, 1), (1, 0), (3, 7, 9)),
    (2, 3, (5, 5), (1, 1), (2, 2), (1, 5, 5)),
    (3, 16, (3, 3), (1, 1), (1, 1), (2, 8, 8)),
    (3, 32, (3, 3), (2, 2), (1, 1), (5, 9, 7)),
    (3, 20, (1, 1), (2, 1), (1, 1), (1, 6, 7)),
    (4, 64, (3, 3), (2, 1), (2, 2), (2, 7, 9)),
    (4, 16, (1, 1), (1, 1), (0, 0), (17, 4, 4)),
    (7, 3, (3, 3), (1, 1), (0, 0), (2, 7, 9)),
    (7, 32, (3, 1), (1, 1), (2, 1), (1, 7, 9)),
    (7, 20, (5, 5), (2, 2), (1, 1), (2, 8, 7)),
    (8, 16, (3, 3), (1, 1), (1, 1), (3, 10, 10)),
    (8, 64, (1, 1), (2, 2), (0, 0), (1, 9, 9)),
    (16, 16, (3, 3), (1, 1), (1, 1), (5, 8, 8)),
    (16, 32, (3, 3), (2, 2), (1, 1), (3, 9, 7)),
    (16, 3, (5, 5), (2, 1), (2, 2), (1, 7, 9)),
    (16, 64, (1, 1), (1, 1), (1, 1), (2, 7, 9)),
    (16, 20, (3, 1), (1, 1), (0, 1), (1, 3, 3)),
    (16, 16, (3, 3), (1, 1), (1, 1), (4, 8, 8)),
]
MANY = [(16, 65, (3, 3), (1, 1), (1, 1), (3, 7, 9)), (17, 24, (3, 3), (2, 2), (1, 1), (2, 9, 7)),
        (64, 128, (1, 1), (2, 2), (0, 0), (3, 8, 8)), (32, 32, (3, 3), (1, 1), (1, 1), (5, 8, 8))]  # fmt: skip


def made(shape, dtype, with_residual, device="cpu"):
    """Arguments, and the result in double precision of what they hold."""
    channels, out, kernel, stride, padding, (count, height, width) = shape
    torch.manual_seed(hash(shape) % 1000)
    last = {"memory_format": torch.channels_last}
    x = torch.randn(count, channels, height, width).to(device, dtype).contiguous(**last)
    weight = (torch.randn(out, channels, *kernel) / (channels * kernel[0] * kernel[1]) ** 0.5).to(device, dtype)
    weight, bias = weight.contiguous(**last), torch.randn(out).to(device, dtype)
    expected = F.conv2d(x.double(), weight.double(), bias.double(), stride, padding)
    residual = torch.randn(expected.shape).to(device, dtype).contiguous(**last) if with_residual else None
    expected = (expected + residual.double() if with_residual else expected).relu()
    return (x, weight, bias, stride, padding, residual), expected


def error(found, expected):
    """The largest error, in units of what rounding the result to its type may cost."""
    allowed = torch.finfo(found.dtype).eps * (expected.abs() + 0.5)
    return float(((found.double() - expected).abs() / allowed).max())


INTERPRETED = """
import json, sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
import test_launch as tests
from peerbayes.kernels import launch as kernels
found = []
for shape in tests.SHAPES:
    for dtype in (torch.float32, torch.float16):
        for residual in (False, True):
            arguments, expected = tests.made(shape, dtype, residual)
            result = kernels._launch(*arguments)
            assert result.is_contiguous(memory_format=torch.channels_last)
            found.append([repr(shape), str(dtype), residual, tests.error(result, expected), float(expected.mean())])
print(json.dumps(found))
"""


def test_the_kernel_for_few_channels_in_tritons_interpreter():
    pytest.importorskip("triton")
    here = os.path.dirname(__file__)
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, here], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 4 * len(SHAPES)
    # Sums of up to 400 products in float32; half precision rounds once, when it stores.
    assert [case for case in found if not case[3] < (10 if case[1] == "torch.float32" else 1.1)] == []
    assert all(case[4] > 0.1 for case in found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES + MANY, ids=str)
def test_both_kernels_on_a_gpu(shape, dtype):
    for residual in (False, True):
        arguments, expected = made(shape, dtype, residual, "cuda")
        found = conv_relu(*arguments)
        assert found.shape == expected.shape
        assert error(found, expected) < 2


@pytest.mark.gpu
def test_the_kernels_see_more_pixels_than_32_bits_can_count_bytes_of():
    count = (1 << 31) // (16 * 32 * 32) + 3  # more than 2^31 numbers
    x = torch.zeros(count, 16, 32, 32, dtype=torch.float16, device="cuda").contiguous(memory_format=torch.channels_last)
    torch.manual_seed(0)
    x[-2:] = torch.randn(2, 16, 32, 32)
    weight = (torch.randn(16, 16, 3, 3, device="cuda") / 12).half().contiguous(memory_format=torch.channels_last)
    bias = torch.randn(16, device="cuda").half()
    found = conv_relu(x, weight, bias, (1, 1), (1, 1), x)
    expected = F.conv2d(x[-2:].double(), weight.double(), bias.double(), 1, 1) + x[-2:].double()
    assert error(found[-2:], expected.relu()) < 2


@pytest.mark.parametrize("residual", [None, "residual"])
@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize(
    ("channels", "out", "small"),
    [(1, 1, True), (16, 64, True), (16, 16, True), (17, 16, False), (16, 65, False), (64, 64, False)],
)
def test_few_channels_go_to_triton_where_it_is_and_others_to_cudnn(channels, out, small, triton, residual, monkeypatch):
    """The kernel's tiles hold 16 channels of a tap and 64 of the result; cuDNN's are mostly empty below that."""
    calls = []
    for owner, name in [(torch, "cudnn_convolution_relu"), (torch, "cudnn_convolution_add_relu"), (kernels, "_launch")]:
        monkeypatch.setattr(owner, name, lambda *arguments, name=name: calls.append((name, *arguments)), raising=False)
    monkeypatch.setattr(kernels, "_kernel", lambda name: {"small_conv": "it"}[name] if triton else None)
    x, weight = SimpleNamespace(is_cuda=True), torch.empty(out, channels, 3, 3)  # nothing else is asked of x
    conv_relu(x, weight, "bias", "stride", "padding", residual)
    if small and triton:
        assert calls == [("_launch", x, weight, "bias", "stride", "padding", residual)]
    elif residual is None:
        assert calls == [("cudnn_convolution_relu", x, weight, "bias", "stride", "padding", (1, 1), 1)]
    else:
        rest = (residual, 1.0, "bias", "stride", "padding", (1, 1), 1)
        assert calls == [("cudnn_convolution_add_relu", x, weight, *rest)]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", SHAPES[::4] + MANY, ids=str)
def test_on_a_cpu_it_is_plain(shape, residual):
    arguments, expected = made(shape, torch.float32, residual)
    before = [argument.clone() for argument in arguments if isinstance(argument, torch.Tensor)]
    assert error(conv_relu(*arguments), expected) < 50
    after = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("added", ["number", "channels", "images", "float64", "larger", "unbatched"])
def test_what_is_added_may_have_any_shape_that_a_sum_allows(added, device):
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.float16
    conv = nn.Conv2d(4, 6, 3, padding=1, device=device)
    x = torch.randn(2, 4, 5, 5, device=device)
    if added == "larger":
        conv, x = nn.Conv2d(4, 6, 5, device=device), x
    if added == "unbatched":
        x = x[0]
    residual = {
        "number": 0.7,
        "channels": torch.randn(1, 6, 1, 1, device=device),
        "images": torch.randn(2, 1, 5, 5, device=device),
        "float64": torch.randn(2, 6, 5, 5, device=device, dtype=torch.float64),
        "larger": torch.randn(2, 6, 4, 4, device=device),
        "unbatched": None,
    }[added]
    with torch.no_grad():
        fused = FusedConv(conv)
        fused.weight, fused.bias = nn.Parameter(conv.weight.to(dtype)), nn.Parameter(conv.bias)
        found, plain = fused(x, residual), conv(x)
    expected = (plain if residual is None else plain + residual).relu()
    assert found.shape == expected.shape
    assert torch.allclose(found.double(), expected.double(), atol=1e-5 if device == "cpu" else 2e-2)


@pytest.mark.parametrize(
    ("module", "answer"),
    [
        (nn.Conv2d(4, 4, 3, (2, 1), (1, 0)), True),
        (nn.Conv2d(4, 4, 3, groups=2), False),
        (nn.Conv2d(4, 4, 3, dilation=2), False),
        (nn.Conv2d(4, 4, 3, padding="same"), False),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), False),
        (nn.Conv1d(4, 4, 3), False),
    ],
)
def test_only_plain_convolutions_are_fused(module, answer):
    assert can_fuse(module) is answer
