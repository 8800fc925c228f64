"""YAML that a user wrote: whatever is wrong with it is one error that names the file."""

from __future__ import annotations

from typing import Any

from monkeyjump.errors import ConfigError, require


def parse_yaml(content: bytes, source: str, *, as_written: bool = False) -> dict[str, Any]:
    """The keys and values of a file. `as_written` leaves every value the text it is: YAML reads `no` as False."""
    require("yaml", f"{source} needs PyYAML", "cli")
    import yaml

    base: Any = yaml.BaseLoader if as_written else yaml.SafeLoader

    class Loader(base):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # ten lines of them can stand for more than any memory holds
                name = self.peek_event().anchor
                raise yaml.YAMLError(f"it refers to another place with *{name}; write the value out instead")
            return super().compose_node(parent, index)

    try:
        found = yaml.load(content.decode("utf-8-sig"), Loader)
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply to be read: write fewer levels.", title="bad file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 text ({error}): save it as UTF-8.", title="bad file") from None
    except (yaml.YAMLError, ValueError) as error:  # a date such as 2024-13-01 is a ValueError
        raise ConfigError(f"{source} is not valid YAML: {error}", title="bad file") from None
    if found is None or found == "":
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{source} must hold keys and values, not a {type(found).__name__}.", title="bad file")
    return found
