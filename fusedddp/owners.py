"""Where in a module its parameters are, in order to notice that one was replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch.nn import Module, Parameter


class Owners:
    """The submodules that hold parameters.

    Args:
        module: the root of them.
        params: those that may be asked for; an index is a position in here.
        wrapped: all parameters that were there when the module was wrapped.
        ignored: names of parameters that may be anything.
    """

    def __init__(
        self,
        module: Module,
        params: Sequence[Parameter],
        wrapped: Iterable[Parameter],
        ignored: Collection[str],
    ) -> None:
        places = {
            id(param): (submodule, name)
            for submodule in module.modules()
            for name, param in submodule.named_parameters(recurse=False)
        }
        self._module = module
        self._params = params
        self._wrapped = {id(param) for param in wrapped}
        self._places = [places[id(param)] for param in params]
        self._ignored = ignored

    def check(self, indices: Sequence[int]) -> None:
        """Raises RuntimeError if the module has other parameters by now than those at `indices`."""
        if all(
            owner._parameters.get(name) is self._params[index]
            for index in indices
            for owner, name in [self._places[index]]
        ):
            return
        # Not where they were; a parametrization may have moved them, though.
        for name, param in self._module.named_parameters():
            if id(param) not in self._wrapped and name not in self._ignored:
                raise RuntimeError(
                    f"expected the parameters that were wrapped, found another one as {name}: its "
                    "gradient is not averaged. Wrap the module again after replacing parameters "
                    "(load_state_dict(assign=True) replaces all)."
                )
