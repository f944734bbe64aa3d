"""Stop drawing for images whose predicted class no longer changes."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Referee:
    """Decide when the leading class of an image is settled, by betting (Waudby-Smith and Ramdas 2023).

    To test that rival c' is at least as probable as the leader c, a gambler stakes a fraction λ on every draw of
    d = p_c − p_c' ∈ [−1, 1]; if the rival's average is truly as large, the capital Π (1 + λ d) is a
    super-martingale and exceeds 1/δ with probability at most δ at any time. The leader is settled when the gambler
    has won against every rival; the true best class is one of them, so no correction for their number is
    needed. The leader is fixed before the draws that test it; a new leader restarts the test with δ 6/(π² k²) at
    the k-th start, which sum to δ.

    Args:
        log_p: of the first draw, (N, C); only its shape and device count.
        level: δ, the probability that a settled leader is not the most probable class.
    """

    STAKES = (0.1, 0.3, 0.6, 0.9)

    def __init__(self, log_p: Tensor, level: float) -> None:
        count, classes = log_p.shape
        self.level = level
        self.leader = torch.full((count,), -1, dtype=torch.int64, device=log_p.device)
        self.starts = torch.zeros(count, device=log_p.device)
        self.capital = torch.zeros(count, classes, len(self.STAKES), device=log_p.device)
        self.stakes = torch.tensor(self.STAKES, device=log_p.device)

    def settled(self, here: Tensor, p: Tensor, total: Tensor) -> Tensor:
        """Take in one draw's probabilities and return which images are settled, a mask (n,).

        Args:
            here: the images, int64 (n,).
            p: their probabilities in this draw, (n, C).
            total: their probabilities summed over all draws, (n, C).
        """
        leader, capital = self.leader[here], self.capital[here]
        valid = leader >= 0
        margin = p.gather(1, leader.clamp_min(0)[:, None]) - p
        capital += torch.log1p(self.stakes * margin[..., None]) * valid[:, None, None]
        wealth = torch.logsumexp(capital, -1) - math.log(len(self.STAKES))
        wealth.scatter_(1, leader.clamp_min(0)[:, None], math.inf)
        starts = self.starts[here]
        needed = -math.log(self.level * 6 / math.pi**2) + 2 * starts.clamp_min(1).log()
        done = valid & (wealth.amin(1) >= needed)
        now = total.argmax(1)
        new = now != leader
        self.starts[here] = starts + new
        self.leader[here] = torch.where(new, now, leader)
        self.capital[here] = torch.where(new[:, None, None], torch.zeros_like(capital), capital)
        # A class that no longer leads the average is not settled, whatever it won earlier.
        return done & ~new
