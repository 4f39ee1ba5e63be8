"""Which parameters receive gradients, round after round, and which should have."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.nn import Parameter

from fusedddp.config import Options
from fusedddp.control import Part


class Usage:
    """Remembers what a round lacked, for the next forward to raise, and what a graph uses.

    Several backwards of one forward, or a nested one that ends early, are several rounds; what any
    of them brought is not lacking. What is frozen by now is not expected to bring anything.

    Args:
        names: of the parameters.
        params: all parameters of the reducer.
        options: the wrapper's options.
        group: the process group.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[Parameter],
        options: Options,
        group: dist.ProcessGroup,
    ) -> None:
        self._names = names
        self._params = params
        self.options = options
        self._group = group
        self._world_size = dist.get_world_size(group)
        # Parameters that lacked a gradient here, and on other ranks, in every round since the last
        # forward; None before the first of them.
        self._lacking: tuple[set[int], set[int]] | None = None
        self._num_ranks: list[int] | None = [0] * len(params)
        # With a static graph: on how many ranks each parameter is used, and whether that is final,
        # which it is once a forward follows.
        self._static_ranks = [0] * len(params)
        self._static_here = bytearray(len(params))
        self._has_static = False
        self._is_settled = False
        # Ranks of the last round whose backward was ended by an exception, if not all were.
        self._num_abandoned = 0
        self._first: bytes | None = None
        self.has_varied = False
        self.has_frozen_since = False

    def local_used_map(self) -> Tensor:
        """On how many ranks each parameter received a gradient in the last round: [params], int32.

        What ranks have not told each other counts as on all or on none.
        """
        num_ranks = self._num_ranks or [self._world_size] * len(self._params)
        return torch.tensor(num_ranks, dtype=torch.int32)

    def note_round(
        self,
        fired: bytearray,
        num_ranks: Sequence[int] | None,
        num_expected: int,
        *,
        part: Part,
        num_abandoned: int,
    ) -> None:
        """Remembers what a round brought.

        Args:
            fired: one byte per parameter, 1 if it has received a gradient here.
            num_ranks: for each parameter on how many ranks it has; None if that was not exchanged.
            num_expected: how many ranks meant to contribute.
            part: how this rank took part.
            num_abandoned: how many ranks had their backward ended by an exception.

        Raises:
            RuntimeError: the graph is static by promise, and uses a parameter that it did not use.
        """
        if 0 < num_abandoned < self._world_size:
            self._num_abandoned = num_abandoned
        if part is Part.WHOLE:
            self._first = self._first or bytes(fired)
            self.has_varied |= bytes(fired) != self._first
        if num_ranks is None and 0 not in fired and not self.options.static_graph:
            # By far the most common case, and too often to look at each parameter.
            self._num_ranks = None
            self._lacking = (set(), set())
            return
        everywhere = num_ranks or [num_expected if has_fired else 0 for has_fired in fired]
        self._num_ranks = list(everywhere)
        is_full = num_expected == self._world_size
        if self.options.static_graph and not self._is_settled and is_full:
            self._has_static = True
            self._static_ranks = [*map(max, self._static_ranks, everywhere)]
            self._static_here = bytearray(map(operator.or_, self._static_here, fired))
        lacking = [i for i, count in enumerate(everywhere) if count < num_expected]
        frozen = {i for i in lacking if not self._params[i].requires_grad}
        self.has_frozen_since |= bool(frozen)
        here, elsewhere = set(), set()
        if part is Part.WHOLE and not self.options.find_unused_parameters:
            due = self._due_ranks(num_expected)
            here = {i for i in lacking if not fired[i] and self._is_due(i)}
            elsewhere = {i for i in lacking if everywhere[i] < due[i]}
        here -= frozen
        elsewhere -= here | frozen
        if self._lacking is not None:
            here &= self._lacking[0]
            elsewhere &= self._lacking[1]
        self._lacking = (here, elsewhere)
        if self.options.static_graph and self._is_settled:
            self._refuse_new(fired, everywhere)

    def _is_due(self, index: int) -> bool:
        return not self.options.static_graph or bool(self._static_here[index])

    def _due_ranks(self, num_expected: int) -> list[int]:
        if not self.options.static_graph:
            return [num_expected] * len(self._params)
        num_left_out = self._world_size - num_expected
        return [count - num_left_out for count in self._static_ranks]

    def _refuse_new(self, fired: bytearray, everywhere: Sequence[int]) -> None:
        new = [
            i
            for i, (count, before) in enumerate(zip(everywhere, self._static_ranks, strict=True))
            if count > before or (fired[i] and not self._static_here[i])
        ]
        if new:
            names = ", ".join(self._names[i] for i in new)
            self.forget()
            raise RuntimeError(
                "Your training graph has changed in this iteration, e.g., one parameter is unused "
                "in the first iteration, but then got used in the second iteration. This is not "
                f"compatible with static_graph set to True. Found gradients for {names}, which had "
                "none in the first iteration; those of this backward are dropped. Use "
                "find_unused_parameters=True for a graph that changes."
            )

    def forget(self) -> None:
        """Starts anew after an error, or for a graph that is static from now on."""
        self._lacking = None
        self._static_ranks = [0] * len(self._params)
        self._static_here = bytearray(len(self._params))
        self._has_static = False
        self._is_settled = False

    def drop_lacking(self) -> None:
        """Takes it that what the last round lacked is known already."""
        self._lacking = None

    def start_forward(self) -> None:
        """Called before a forward whose backward is to be reduced.

        Raises:
            RuntimeError: the last reduction lacked gradients, and that is not allowed; or the last
                backward ended in an exception on some ranks and not on all.
        """
        num_abandoned, self._num_abandoned = self._num_abandoned, 0
        if num_abandoned:
            self._lacking = None
            raise RuntimeError(
                f"expected the last backward to run to its end on all ranks, found that an "
                f"exception ended it on {num_abandoned} of {self._world_size}. Zeros were averaged "
                "for what was missing; if an optimizer has stepped on that, replicas differ by "
                "now. Catch the exception where it is raised, call model.skip_backward() there, "
                "and step with the others; or load a checkpoint."
            )
        if self._lacking is None:
            return
        self._is_settled = self._has_static
        here, elsewhere = self._lacking
        self._lacking = None
        if here or elsewhere:
            self.forget()
            raise RuntimeError(self._describe_unfinished(sorted(here), sorted(elsewhere)))

    def _describe_unfinished(self, here: list[int], elsewhere: list[int]) -> str:
        rank = dist.get_rank(self._group)
        text = (
            "Expected to have finished reduction in the prior iteration before starting a new one. "
        )
        if self.options.static_graph:
            text += (
                "This error indicates that your training graph has changed in this iteration, "
                "e.g., one parameter is used in first iteration, but then got unused in the second "
                "iteration. this is not compatible with static_graph set to True."
            )
        else:
            text += (
                "In the last backward some parameters received no gradient; zeros were averaged "
                "for them, so that ranks stay in step. If that is intended, say so by passing the "
                "keyword argument `find_unused_parameters=True` to fusedddp.wrap; else make sure "
                "that all `forward` function outputs participate in calculating loss."
            )
        if get_debug_level() == DebugLevel.OFF:
            text += (
                " For what torch.distributed itself has to say, set the environment variable "
                "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL."
            )
        lines = [text]
        numbers = " ".join(map(str, here))
        if here:
            lines.append(f"Parameter indices which did not receive grad for rank {rank}: {numbers}")
            lines.append(
                f"Parameters which did not receive grad for rank {rank}: "
                + ", ".join(self._names[i] for i in here)
            )
        if elsewhere:
            lines.append(
                f"Parameters which did not receive grad on other ranks than rank {rank}: "
                + ", ".join(self._names[i] for i in elsewhere)
            )
        return "\n".join(lines)
