"""Loss terms: the summands of a peer's loss."""

from peerbayes.terms import distillation, diversity, elbo, mutual
from peerbayes.terms.definition import Shapes, Term, find, names, term
from peerbayes.terms.fusion import Fusion
from peerbayes.terms.step import Batch, Output, Step

__all__ = [
    "Batch",
    "Fusion",
    "Output",
    "Shapes",
    "Step",
    "Term",
    "distillation",
    "diversity",
    "elbo",
    "find",
    "mutual",
    "names",
    "term",
]
