"""The model's own names, whatever was wrapped around parts of it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

__all__ = ["OwnNames", "names_of"]

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}  # what torch.compile and checkpoint_wrapper put into names


class OwnNames:
    """Called with the name that something has now, gives the one that it had in the model."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """``names``: those of the model before anything was wrapped."""
        self.names = frozenset(names)

    def __call__(self, name: str) -> str:
        if not self.names or name in self.names:
            return name
        return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def names_of(model: nn.Module) -> set[str]:
    """The names of all that a model has names for."""
    found = {name for name, _ in model.named_modules(remove_duplicate=False)}
    found |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return found | {name for name, _ in model.named_buffers(remove_duplicate=False)} | set(model.state_dict())
