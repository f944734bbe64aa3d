"""IVON (Shen et al. 2024): a natural-gradient step of Gaussians, of the cost of a step of Adam.

For means m with scales σ, an average loss ℓ, its gradient ĝ at a draw w = m + σ ε, N = ``ess`` and a decay δ:

    ĥ = ĝ ε / σ                          an estimate of the diagonal of the Hessian of ℓ
    g ← β₁ g + (1 − β₁) ĝ
    h ← β₂ h + (1 − β₂) ĥ + ½ (1 − β₂)² (h − ĥ)² / (h + δ)
    m ← m − lr (g / (1 − β₁ᵗ) + δ m) / (h + δ)
    σ ← 1 / √(N (h + δ))

which goes to the Gaussian that is best for ``N ℓ`` and the prior N(0, 1 / (N δ)). There is no other state than g and h,
and h is σ by another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerbayes.posteriors.scales import inverse_softplus, sigma_gradient

BETA2 = 0.99999  # of the published runs on CIFAR


class Ivon(torch.optim.Optimizer):
    """IVON for Gaussians whose scales are kept as ρ, σ = softplus(ρ).

    The Hessian that it begins with is that of the scales it is given: h = 1 / (N σ²) − δ. A gradient of ρ must come of
    draws alone, ∂ℓ/∂ρ = ĝ ε softplus′(ρ): so a KL has no place beside it. Parameters without scales take the same step
    with h + δ = 1, that of SGD with averaged gradients. All of it stays on the device, and can be captured.

    Args:
        groups: parameters with their options, as of `torch.optim`; their ``lr`` may be a tensor on the device.
        rhos: of the parameters that are means, by themselves.
        lr: learning rate.
        ess: N, the images that the posterior has seen.
        weight_decay: δ of groups that do not say.
        momentum: β₁.
        beta2: β₂.

    Example:
        >>> import torch
        >>> from peerbayes.engine.ivon import Ivon
        >>> mean, rho = (torch.nn.Parameter(torch.tensor([value])) for value in (1.0, -3.0))
        >>> optimizer = Ivon([{"params": [mean, rho]}], {mean: rho}, lr=0.1, ess=100.0, weight_decay=0.01)
        >>> loss = 0.5 * (mean + torch.nn.functional.softplus(rho) * 0.3) ** 2
        >>> loss.sum().backward()
        >>> optimizer.step()
        >>> h = optimizer.state[mean]["hessian"]
        >>> torch.allclose(torch.nn.functional.softplus(rho), (100 * (h + 0.01)).rsqrt())
        True
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rhos: Mapping[nn.Parameter, nn.Parameter],
        *,
        lr: float | Tensor,
        ess: float,
        weight_decay: float,
        momentum: float = 0.9,
        beta2: float = BETA2,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self.rhos, self.ess, self.momentum, self.beta2 = dict(rhos), ess, momentum, beta2
        followers = set(self.rhos.values())
        # Now, not at the first step: an engine's warm-up puts back what was there before it, and zeroes all else.
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in followers:
                    self.state[parameter] = self._begun(parameter, group["weight_decay"])

    @torch.no_grad()
    def _begun(self, parameter: nn.Parameter, decay: float) -> dict[str, Tensor]:
        rho = self.rhos.get(parameter)
        curvature = parameter.new_ones(()) if rho is None else 1 / (self.ess * F.softplus(rho).square())
        return {
            "step": torch.zeros((), dtype=torch.float64, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "hessian": curvature - decay,
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Move means against their gradient, and scales to what the Hessian says."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and "hessian" in self.state[parameter]:
                    self._move(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _move(self, mean: nn.Parameter, gradient: Tensor, lr: float | Tensor, decay: float) -> None:
        slots, rho = self.state[mean], self.rhos.get(mean)
        slots["step"].add_(1)
        slots["exp_avg"].lerp_(gradient, 1 - self.momentum)
        hessian = slots["hessian"]
        if rho is not None and rho.grad is not None:
            found = sigma_gradient(rho, rho.grad) / F.softplus(rho)
            off, rate = hessian - found, 1 - self.beta2
            hessian.add_(0.5 * (rate * off).square() / (hessian + decay) - rate * off)
        averaged = slots["exp_avg"] / (1 - self.momentum ** slots["step"])
        mean.sub_(lr * (averaged + decay * mean) / (hessian + decay))
        if rho is not None:
            rho.copy_(inverse_softplus((self.ess * (hessian + decay)).rsqrt()))
