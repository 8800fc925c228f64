"""The tables of docs/reference.md: every key of task files, recipes and adapters, from the types that check them.

`python docs/make_reference.py` makes them anew, with the schemas for editors beside the page.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from monkeyjump.record import write_atomic
from monkeyjump.tasks.files import ENDINGS
from monkeyjump.training.schema import Schema, method_keys, option_owners, recipe_schema, task_schema

PAGE = "reference.md"

_TYPES = {"string": "text", "integer": "whole number", "boolean": "true or false"}
_JSON_TYPES = {str: "string", bool: "boolean", type(None): "null"}
_RULES = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "not empty",
    "minItems": "not empty",
    "minProperties": "not empty",
    "uniqueItems": "each once",
}


def write_documents(folder: Path) -> None:
    """Make the tables of reference.md anew, and both schemas."""
    page = (folder / PAGE).read_text(encoding="utf-8")
    write_atomic(folder / PAGE, reference_page(page))
    for name, schema in (("recipe", recipe_schema()), ("task", task_schema())):
        write_atomic(folder / f"{name}.schema.json", json.dumps(schema, indent=2) + "\n")


def reference_page(page: str) -> str:
    """The page with its tables made anew; each stands between `<!-- name -->` and `<!-- end -->`."""
    recipe, options = recipe_schema(), option_owners()
    tables = {
        "task": _table(_keys(task_schema())),
        "endings": ", ".join(f"`{ending}`" for ending in ENDINGS),
        "recipe": _recipe_tables(recipe),
        "adapter": _adapter_tables(recipe["properties"]["adapter"]["properties"]),
        **{section: _tables_by_owner(owners) for section, owners in options.items()},
        "method_keys": _table(method_keys()),
    }
    return re.sub(
        r"<!-- (\w+) -->\n.*?<!-- end -->",
        lambda found: f"<!-- {found[1]} -->\n\n{tables[found[1]]}\n\n<!-- end -->",
        page,
        flags=re.DOTALL,
    )


def _keys(schema: Schema, prefix: str = "", sections: Schema | None = None) -> dict[str, Schema]:
    """Every key, those of sections as `section.key`; a key that must be given has no default."""
    sections = sections or schema.get("$defs", {})
    found: dict[str, Schema] = {}
    for name, part in schema["properties"].items():
        section = sections.get(part.get("$ref", "").rpartition("/")[2])
        found |= _keys(section, f"{prefix}{name}.", sections) if section else {f"{prefix}{name}": part}
    return found


def _recipe_tables(recipe: Schema) -> str:
    """The keys outside sections, then those of each section."""
    keys = _keys(recipe)
    tables = [_table({name: part for name, part in keys.items() if "." not in name})]
    for section in dict.fromkeys(name.partition(".")[0] for name in keys if "." in name):
        about = recipe["$defs"][recipe["properties"][section]["$ref"].rpartition("/")[2]]["description"]
        own = {name: part for name, part in keys.items() if name.startswith(f"{section}.")}
        tables.append(f"### {section}\n\n{about}\n\n{_table(own)}")
    return "\n\n".join(tables)


def _adapter_tables(keys: Mapping[str, Schema]) -> str:
    """The fields of MonkeyJumpConfig under the comments that group them in the class."""
    from monkeyjump.config import MonkeyJumpConfig

    groups: dict[str, dict[str, Schema]] = {}
    for comment, name in re.findall(r"^    (?:# (.+)|(\w+): )", inspect.getsource(MonkeyJumpConfig), re.MULTILINE):
        if comment:
            groups[comment] = {}
        elif name in keys:
            groups[list(groups)[-1]][name] = keys[name]
    return "\n\n".join(f"### {title}\n\n{_table(group)}" for title, group in groups.items())


def _tables_by_owner(owners: Mapping[str, Mapping[str, Schema]]) -> str:
    return "\n\n".join(f"With `{owner}`:\n\n{_table(options)}" for owner, options in owners.items() if options)


# -- tables -------------------------------------------------------------------------------------


def _table(keys: Mapping[str, Schema]) -> str:
    lines = ["| key | type | default | rule | meaning |", "|---|---|---|---|---|"]
    for name, part in keys.items():
        default = f"`{_yaml(part['default'])}`" if "default" in part else "must be given"
        cells = (f"`{name}`", _type(part), default, _rule(part), part["description"])
        lines.append(f"| {' | '.join(map(_escaped, cells))} |")
    return "\n".join(lines)


def _escaped(cell: str) -> str:
    """Outside of `code` nothing is markup; a bar ends a cell in code, too."""
    plain = re.sub(r"`[^`]*`|[\\*<\[]", lambda found: found[0] if len(found[0]) > 1 else f"\\{found[0]}", cell)
    return plain.replace("|", "\\|")


def _yaml(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _type(part: Schema) -> str:
    if "type" not in part and "anyOf" in part:
        return _either(_type(each) for each in part["anyOf"])
    kinds: Any = part.get("type") or list(dict.fromkeys(_JSON_TYPES[type(value)] for value in part.get("enum", [])))
    if isinstance(kinds, list):  # what follows the first is another way to write it, but for null
        first = [kind for kind in kinds if kind != "null"]
        kinds = [*(first if "enum" in part else first[:1]), *["null"] * ("null" in kinds)]
        return _either(_type({**part, "type": kind}) for kind in kinds)
    if kinds == "array":
        return f"list of {_type(part['items'])}s"
    if kinds == "object":
        inner = part["additionalProperties"]
        return f"{_type(inner)} for each name" if isinstance(inner, dict) else "section"
    return str(_TYPES.get(kinds, kinds))


def _either(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _rule(part: Schema) -> str:
    found = [words.format(part[name]) for name, words in _RULES.items() if name in part]
    if "enum" in part:
        found.append(f"one of {', '.join(map(_yaml, part['enum']))}")
    if part.get("type") == "string" and "pattern" in part:
        found.append("the name of one folder")
    for inner in (part.get("items"), part.get("additionalProperties")):
        if isinstance(inner, dict) and _rule(inner):
            found.append(f"each {_rule(inner)}")
    alternatives: list[str] = []
    for rule in map(_rule, part.get("anyOf", [])):
        if not any(rule in other for other in ["", *alternatives]):  # a list of numbers and a number have one rule
            alternatives.append(rule)
    return ", ".join([*found, *filter(None, [" or ".join(alternatives)])])


if __name__ == "__main__":
    write_documents(Path(__file__).parent)
