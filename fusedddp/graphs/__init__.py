"""Whole training steps as graphs: `make_graphed_step` and what it is made of."""

from fusedddp.graphs.make import make_graphed_step
from fusedddp.graphs.split import SplitStep
from fusedddp.graphs.step import GraphedStep

__all__ = ["GraphedStep", "SplitStep", "make_graphed_step"]
