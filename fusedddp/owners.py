"""Where in a module its parameters are, in order to notice that one was replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from torch.nn import Module, Parameter


class _Place(NamedTuple):
    """How to get at a parameter: through these submodules, by that name in the last of them."""

    path: tuple[tuple[str, Module], ...]
    name: str

    def finds(self, root: Module, param: Parameter) -> bool:
        owner = root
        for name, submodule in self.path:
            if owner._modules.get(name) is not submodule:
                return False
            owner = submodule
        return owner._parameters.get(self.name) is param


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
        self._module = module
        self._params = params
        self._wrapped = {id(param) for param in wrapped}
        self._ignored = ignored
        places: dict[int, _Place] = {}
        paths: dict[str, tuple[tuple[str, Module], ...]] = {"": ()}
        for prefix, submodule in module.named_modules():
            for name, child in submodule.named_children():
                full = f"{prefix}.{name}" if prefix else name
                paths[full] = (*paths[prefix], (name, child))
            for name, param in submodule.named_parameters(recurse=False):
                places[id(param)] = _Place(paths[prefix], name)
        self._places = [places[id(param)] for param in params]

    def check(self, indices: Sequence[int]) -> None:
        """Raises RuntimeError if the module has other parameters by now than those at `indices`."""
        if all(self._places[i].finds(self._module, self._params[i]) for i in indices):
            return
        # Not where they were; a parametrization may have moved them, though.
        for name, param in self._module.named_parameters():
            if id(param) not in self._wrapped and name not in self._ignored:
                raise RuntimeError(
                    f"expected the parameters that were wrapped, found another one as {name}: its "
                    "gradient is not averaged. Wrap the module again after replacing parameters "
                    "(load_state_dict(assign=True) replaces all)."
                )
