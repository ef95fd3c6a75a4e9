"""A model that is one stage: nothing is cut, so nothing need be known of its forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.split.lazy import build, members
from penstock.split.line import Groups, Line
from penstock.split.plan import Edge

__all__ = ["WholeLine"]


class WholeLine(Line):
    """One layer, the whole model, for models whose forward cannot be followed."""

    layers = ("model",)
    recipe = {"front": "whole"}  # noqa: RUF012

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def members(self, layer: str) -> Iterable[tuple[str, Tensor]]:
        return members(self.model, "")

    def edges(self, groups: Groups) -> tuple[Edge, ...]:
        if len(groups) > 1:
            raise PlanError(f"the model is one layer, which cannot be cut into {len(groups)} stages")
        return ()

    def stage(self, groups: Groups, index: int) -> nn.Module:
        return _WholeStage(build(self.model))

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, kwargs


class _WholeStage(nn.Module):
    """Calls the model. What the model holds is held here as well, under the same names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["_penstock_model"] = model
        for held in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[held] = getattr(model, held)

    @property
    def training(self) -> bool:
        model: nn.Module | None = self.__dict__.get("_penstock_model")
        return True if model is None else model.training

    @training.setter
    def training(self, value: bool) -> None:
        model: nn.Module | None = self.__dict__.get("_penstock_model")
        if model is not None:
            model.training = value

    def forward(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = value
        return self.__dict__["_penstock_model"](*args, **kwargs)
