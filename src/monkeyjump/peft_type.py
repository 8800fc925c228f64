"""The PEFT type of this library.

PEFT keys its tables with members of the `PeftType` enum and refuses names it does not know; Transformers reads
`.value` of the same member. A plain string would load but break `delete_adapter` and `load_adapter`, so the enum gets
a real member, once.
"""

from __future__ import annotations

from peft.utils.peft_types import PeftType

NAME = "MONKEYJUMP"


def extend_peft_types(name: str) -> PeftType:
    """Add `name` to the enum `PeftType` unless it is there, and return the member."""
    if name in PeftType.__members__:
        return PeftType[name]
    member = str.__new__(PeftType, name)
    member._name_ = name
    member._value_ = name
    member._sort_order_ = len(PeftType.__members__)  # type: ignore[attr-defined]
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member
    type.__setattr__(PeftType, name, member)
    return member


PEFT_TYPE = extend_peft_types(NAME)
