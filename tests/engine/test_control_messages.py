"""Objects that ranks send each other: values of known types arrive as they were, and no message can run code."""

import collections
import enum
import os
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.serialization

from penstock.engine.channel.control import decode, encode
from penstock.engine.message import detach_outputs, meta_of
from penstock.errors import PipelineError, PlanError


class Kind(enum.Enum):
    FIRST = "first"


@dataclass(frozen=True)
class Row:
    ids: torch.Tensor
    kind: Kind


Point = collections.namedtuple("Point", "x y")


class Unknown:
    def __init__(self, value: int = 0) -> None:
        self.value = value


def test_values_of_known_types_arrive_as_they_were() -> None:
    values = [
        (None, True, 3, 2.5, 1j, "text", b"bytes", slice(1, None), range(3)),
        {"a": [1, {2}, frozenset({3})], (1, 2): collections.OrderedDict(b=1)},
        Point(1, Point(2, 3)),
        Kind.FIRST,
        collections.defaultdict(list, a=[1]),
        (torch.float16, torch.strided, torch.device("cpu"), torch.Size([2, 3])),
        np.float32(2.5),
    ]
    for value in values:
        received = decode(encode(value))
        assert received == value
        assert type(received) is type(value)


def test_tensors_arrays_and_dataclasses_of_them() -> None:
    row = decode(encode(Row(torch.arange(3), Kind.FIRST)))
    assert type(row) is Row
    assert row.kind is Kind.FIRST
    assert row.ids.tolist() == [0, 1, 2]
    array = decode(encode(np.arange(6).reshape(2, 3)))
    assert array.dtype == np.arange(6).dtype
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_metadata_of_a_message_has_its_structure() -> None:
    value = {"x": torch.zeros(2, 3, requires_grad=True), "rest": (torch.zeros(1, dtype=torch.long), 4)}
    meta = meta_of(detach_outputs(value)[0])
    assert decode(encode(meta)) == meta


def test_other_types_are_refused_where_they_are_sent_unless_the_user_trusts_them() -> None:
    with pytest.raises(PlanError, match=r"test_control_messages\.Unknown cannot be sent.*add_safe_globals\(\[Unknown"):
        encode({"value": Unknown()})
    with torch.serialization.safe_globals([Unknown]):
        assert decode(encode(Unknown(7))).value == 7


class Malicious:
    """Unpickled, it runs a command."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Malicious()),
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cpenstock.engine.channel.control\nio.open\n(S'/dev/null'\ntR.",  # reached through an imported module
        b"ctorch\nload\n(S'/dev/null'\ntR.",
        pickle.dumps(Unknown()),
        encode([1, 2])[:-3],
        b"",
    ],
)
def test_a_message_that_names_anything_else_or_is_damaged_is_an_error(data: bytes) -> None:
    with pytest.raises(PipelineError, match="a message of another rank cannot be read"):
        decode(data)
