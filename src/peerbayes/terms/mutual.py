"""Let peers teach each other: the prediction of each is the target of those that learn from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator
from torch import Tensor

from peerbayes.errors import OptionError, nearest
from peerbayes.math import divergences
from peerbayes.schema import Strict
from peerbayes.terms.definition import term
from peerbayes.terms.schedules import NotNegative, Schedule, Temperature, value_at
from peerbayes.terms.step import Step


class Edge(Strict):
    """An edge of the knowledge graph: ``student`` learns from ``teacher``; omitted options are those of the term."""

    teacher: str
    student: str
    alpha: NotNegative | Schedule | None = None
    temperature: Temperature | None = None
    weight: NotNegative | None = None


@dataclass(frozen=True)
class Lesson:
    """An edge of the knowledge graph with all options filled in."""

    teacher: str
    student: str
    alpha: float | Mapping[str, Any]
    temperature: float
    weight: float


def _check_edges(edges: list[Edge]) -> list[Edge]:
    if not edges:
        raise ValueError("the graph is empty, so no peer would learn; set alpha = 0, or leave the term out")
    seen: set[tuple[str, str]] = set()
    for edge in edges:
        if edge.teacher == edge.student:
            raise ValueError(f"peer '{edge.teacher}' can't learn from itself")
        if (edge.teacher, edge.student) in seen:
            raise ValueError(
                f"the edge from teacher '{edge.teacher}' to student '{edge.student}' is given twice; to make it "
                "count more, give it a weight"
            )
        seen.add((edge.teacher, edge.student))
    return edges


Graph = Literal["all", "ring", "best_to_rest"] | Annotated[list[Edge], AfterValidator(_check_edges)]


def lessons(options: Mapping[str, Any], peers: Sequence[str]) -> list[Lesson]:
    """Return the edges of the knowledge graph; for ``best_to_rest`` all pairs, of which a step uses the best peer's.

    Args:
        options: of the term.
        peers: names of all peers, in their order.
    """
    common = {key: options[key] for key in ("alpha", "temperature", "weight")}
    graph = options["graph"]
    if graph == "ring":
        pairs = [(peers[index - 1], name) for index, name in enumerate(peers) if len(peers) > 1]
    elif isinstance(graph, str):
        pairs = [(teacher, student) for student in peers for teacher in peers if teacher != student]
    else:
        return [_lesson(edge, common, peers) for edge in graph]
    return [Lesson(teacher, student, **common) for teacher, student in pairs]


def _lesson(edge: Mapping[str, Any], common: Mapping[str, Any], peers: Sequence[str]) -> Lesson:
    for role in ("teacher", "student"):
        if edge[role] not in peers:
            raise OptionError(f"graph: {role} '{edge[role]}' is not a peer{nearest(edge[role], peers)}")
    settings = {key: edge.get(key, value) for key, value in common.items()}
    return Lesson(edge["teacher"], edge["student"], **settings)


@term(between_peers=True)
def mutual(
    step: Step,
    peer: str,
    *,
    weight: NotNegative = 1.0,
    temperature: Temperature = 1.0,
    alpha: NotNegative | Schedule = 1.0,
    graph: Graph = "all",
) -> Tensor:
    """Return weight · T² · mean over teachers j of (1/B) Σ_b D_α( softmax(z_j/T) ‖ softmax(z_i/T) ), z_j detached.

    ``alpha`` = 1 is the Kullback-Leibler divergence, 0 is independent training; it may be a `Schedule` over the stage.
    ``graph`` says who teaches whom: ``all`` the others, in a ``ring`` the peer before, ``best_to_rest`` the peer with
    the lowest cross-entropy on this batch (of several processes each goes by its own part), or a list of `Edge`, each
    with an alpha, temperature and weight of its own if need be.

    Args:
        step: the step, as the peer sees it.
        peer: the student's name, i.
        weight: factor of the term.
        temperature: T.
        alpha: the order α, or its schedule.
        graph: who teaches whom.
    """
    options = {"weight": weight, "temperature": temperature, "alpha": alpha, "graph": graph}
    mine = [lesson for lesson in lessons(options, step.peers) if lesson.student == peer]
    if not mine:
        return step.labels.new_zeros((), dtype=torch.float32)
    values = torch.cat([_losses(step, peer, alike) for alike in _grouped(mine)])
    if graph != "best_to_rest":
        return values.mean()
    losses = torch.stack([step.cross_entropy(step.logits(name).detach()) for name in step.peers])
    best = losses.argmin()
    teaches = torch.stack([best == step.peers.index(lesson.teacher) for lesson in mine])
    return (values * teaches).sum()


def _grouped(mine: Sequence[Lesson]) -> list[list[Lesson]]:
    """Return the lessons in groups that differ by the teacher alone; all in one where the graph has no options."""
    groups: list[list[Lesson]] = []
    for lesson in mine:
        same = [group for group in groups if replace(group[0], teacher=lesson.teacher) == lesson]
        if same:
            same[0].append(lesson)
        else:
            groups.append([lesson])
    return groups


def _losses(step: Step, peer: str, alike: Sequence[Lesson]) -> Tensor:
    """Return what lessons alike cost their student, shape (lessons,)."""
    temperature, weight = alike[0].temperature, alike[0].weight
    log_q = (step.logits(peer) / temperature).log_softmax(-1)
    targets = torch.stack([step.logits(lesson.teacher) for lesson in alike])
    alpha = value_at(alike[0].alpha, step.epoch)
    divergence = divergences.renyi((targets / temperature).log_softmax(-1), log_q, alpha).mean(-1)
    return weight * temperature**2 * divergence
