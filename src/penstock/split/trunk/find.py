"""Where a model's trunk is: the list of blocks that its hidden state goes through."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from penstock.errors import PlanError, did_you_mean


def find_trunk(model: nn.Module) -> str | None:
    """The name of the model's list of blocks, where the model leaves no doubt about it; else None.

    A Hugging Face model names the classes of its blocks (``_no_split_modules``). Of another model it is the list whose
    members are of one class, that no other list has, and which holds most of the parameters.
    """
    lists = dict(_outermost(_uniform_lists(model)))
    declared = _declared(model)
    if declared:
        return declared[0] if len(declared) == 1 else None
    total = sum(parameter.numel() for parameter in model.parameters())
    for name, blocks in lists.items():
        if sum(type(blocks[0]) is type(others[0]) for others in lists.values()) > 1:
            continue
        held = {id(p): p.numel() for block in blocks for p in block.parameters()}
        if 2 * sum(held.values()) > total:
            return name
    return None


def trunk_name(model: nn.Module, blocks: str | None) -> str:
    """The name of the list of blocks, as the user gave it or as the model says; an error where neither will do."""
    kind = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        two = " and ".join(_declared(model)) or "one each"
        raise PlanError(
            f"{kind} is an encoder and a decoder: two trunks ({two}), and every block of the second needs the end of "
            "the first. That is not supported; a model with one trunk is, such as T5EncoderModel"
        )
    if blocks is not None:
        blocks_at(model, blocks)
        return blocks
    found = find_trunk(model)
    if found is None:
        lists = [name for name, _ in _outermost(_uniform_lists(model))]
        which = f": say which of its lists it is, blocks={lists[0]!r}" if lists else ", and it has no list of blocks"
        more = f" (or {', '.join(lists[1:])})" if len(lists) > 1 else ""
        raise PlanError(f"{kind} does not say where its trunk is{which}{more}")
    return found


def blocks_at(model: nn.Module, name: str) -> list[nn.Module]:
    """The blocks of the list called ``name``."""
    kind = type(model).__name__
    if not isinstance(name, str):
        raise PlanError(f"blocks must be the name of a list of modules, such as 'model.layers', got {name!r}")
    try:
        found = model.get_submodule(name) if name else model
    except AttributeError:
        every = [known for known, _ in model.named_modules() if known]
        lists = [known for known, _ in _uniform_lists(model)]
        none_near = f", whose lists are {lists}"
        hint = did_you_mean(name, lists, cutoff=0.4) or did_you_mean(name, every, otherwise=none_near)
        raise PlanError(f"there is no {name!r} in {kind}{hint}") from None
    if not name or not isinstance(found, (nn.ModuleList, nn.Sequential)):
        raise PlanError(
            f"blocks={name!r} of {kind} is a {type(found).__name__}, not an nn.ModuleList or nn.Sequential of blocks"
        )
    blocks = list(found._modules.values())
    if not blocks or any(block is None for block in blocks):
        raise PlanError(f"blocks={name!r} of {kind} has no blocks in it, or gaps: there is nothing to split")
    if len({id(block) for block in blocks}) != len(blocks):
        raise PlanError(f"one block stands in {name} of {kind} more than once: make each block a module of its own")
    return [block for block in blocks if block is not None]


def _uniform_lists(model: nn.Module, least: int = 2) -> Iterator[tuple[str, list[nn.Module]]]:
    """The lists of several modules of one class."""
    for name, module in model.named_modules():
        if name and isinstance(module, (nn.ModuleList, nn.Sequential)):
            members = [member for member in module._modules.values() if member is not None]
            if len(members) >= least and len({type(member) for member in members}) == 1:
                yield name, members


def _outermost(lists: Iterator[tuple[str, list[nn.Module]]]) -> Iterator[tuple[str, list[nn.Module]]]:
    """Lists that are not inside another of them: a block may have lists of its own."""
    outer: list[str] = []
    for name, members in lists:
        if not any(name.startswith(f"{other}.") for other in outer):
            outer.append(name)
            yield name, members


def _declared(model: nn.Module) -> list[str]:
    """The lists of modules of a class that a Hugging Face model wants left whole."""
    whole: set[str] = set()
    for module in model.modules():
        whole.update(getattr(module, "_no_split_modules", None) or ())
    return [name for name, blocks in _outermost(_uniform_lists(model, 1)) if type(blocks[0]).__name__ in whole]
