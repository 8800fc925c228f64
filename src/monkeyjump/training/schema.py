"""JSON schemas of recipes and task files, for editors: made from the types that check these files.

The fields of MonkeyJumpConfig are the keys under `adapter`. What goes with what is left to the checks themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from monkeyjump import methods
from monkeyjump.checked import Section
from monkeyjump.config import MonkeyJumpConfig
from monkeyjump.config_options import KINDS, OPTION_NAMES
from monkeyjump.methods.presets import METHODS
from monkeyjump.registry import ADAPTERS
from monkeyjump.tasks.task_file import TaskFile
from monkeyjump.training.recipe import Recipe

Schema = dict[str, Any]

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_LIMITS = {"gt": "exclusiveMinimum", "ge": "minimum"}  # pydantic leaves its own names on a constrained `Annotated`
_NUMBER_AS_TEXT = r"^\s*\+?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"
_FOLDER_NAME = r"^(?!\.{1,2}$)[^/\\]+$"


def recipe_schema() -> Schema:
    """What a recipe may hold: the names of methods and adapters are those of the package."""

    def written(part: Schema) -> Schema:  # YAML reads 1e-4 as a text, and a recipe takes it for the number
        is_number = part.get("type") == "number"
        return part | {"type": ["number", "string"], "pattern": _NUMBER_AS_TEXT} if is_number else part

    found: Schema = _changed(_model_schema(Recipe, "monkeyjump recipe"), written)
    keys = found["properties"]
    keys["name"]["pattern"] = _FOLDER_NAME
    keys["tasks"]["anyOf"][0]["minItems"] = 1
    keys["method"]["enum"], keys["preset"]["enum"] = methods.names(), list(methods.PRESETS)
    keys["adapter"] |= {"properties": _adapter_keys(), "additionalProperties": False}
    return found


def task_schema() -> Schema:
    """What a task file may hold. It is read as it was written: 5 is a text there, and an empty key is left out."""

    def written(part: Schema) -> Schema:
        is_text = part.get("type") == "string" and "enum" not in part
        return part | {"type": ["string", "number", "boolean", *["null"] * ("default" in part)]} if is_text else part

    found: Schema = _changed(_model_schema(TaskFile, "monkeyjump task"), written)
    found["$defs"]["TaskData"] |= {
        "anyOf": [{"required": [name]} for name in ("hub", "train", "test")],
        "dependentRequired": {"config": ["hub"], "revision": ["hub"]},
    }
    return found


def _model_schema(model: type[Section], title: str) -> Schema:
    """Without titles such as "Max Length", which say no more than the key."""

    def plain(part: Schema) -> Schema:
        return {_LIMITS.get(key, key): value for key, value in part.items() if (key, type(value)) != ("title", str)}

    return {"$schema": _DRAFT, **_changed(model.model_json_schema(), plain), "title": title}


def _changed(node: Any, change: Callable[[Schema], Schema]) -> Any:
    """A copy of a schema in which every part is changed."""
    if isinstance(node, dict):
        return change({key: _changed(value, change) for key, value in node.items()})
    return [_changed(value, change) for value in node] if isinstance(node, list) else node


def _adapter_keys() -> dict[str, Schema]:
    """Every key under `adapter`: the fields, the options (which are keys by themselves, too), and those of methods."""
    keys = {field.name: _field_schema(field) for field in fields(MonkeyJumpConfig)}
    keys["adapter"]["enum"] = ADAPTERS.names()
    places: dict[str, Schema] = {}
    for section, owners in option_owners().items():
        options: dict[str, Schema] = {}
        for owner, settings in owners.items():
            for name, setting in settings.items():
                earlier = f"{options[name]['description']} " if name in options else ""
                options[name] = setting | {"description": f"{earlier}{owner}: {setting['description']}"}
                places[name] = {"$ref": f"#/properties/adapter/properties/{section}/properties/{name}"}
        about = {key: keys[section][key] for key in ("default", "description")}
        keys[section] = {"type": ["object", "null"], "properties": options, "additionalProperties": False, **about}
    return {**keys, **{name: places[name] for name in OPTION_NAMES}, **method_keys()}


def _field_schema(field: Field[Any]) -> Schema:
    """A field in the keywords that it carries; what PEFT's own fields hold is not checked."""
    if "schema" not in field.metadata:
        return {"description": "A field of PEFT's own."}
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    return {**field.metadata["schema"], "default": default, "description": field.metadata["help"]}


def option_owners() -> dict[str, dict[str, dict[str, Schema]]]:
    """`adapter_options` by adapter, and `method_options` by what a configuration must say to have them."""
    adapters = {f"adapter={name!r}": ADAPTERS.get(name).options for name in ADAPTERS}
    kinds = {kind.needs: {field.name: field for field in fields(kind)} for kind in KINDS.values()}
    return {
        section: {
            owner: {name: _field_schema(field) for name, field in settings.items() if isinstance(field, Field)}
            for owner, settings in owners.items()
        }
        for section, owners in (("adapter_options", adapters), ("method_options", kinds))
    }


def method_keys() -> dict[str, Schema]:
    """What single methods take under `adapter` beside the fields."""
    found: dict[str, Schema] = {}
    for method in methods.names():
        types = get_type_hints(METHODS.get(method))
        for key, parameter in list(inspect.signature(METHODS.get(method)).parameters.items())[1:]:
            about = f"Only for method={method!r}; `monkeyjump methods --about {method}` explains it."
            found[key] = TypeAdapter(types[key]).json_schema() | {"default": parameter.default, "description": about}
    return found
