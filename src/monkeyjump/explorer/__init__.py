"""A page that shows where the tokens of a prompt go: live (`monkeyjump explore`), or recorded in a report."""

from monkeyjump.explorer.engine import recorded
from monkeyjump.explorer.page import fragment

__all__ = ["fragment", "recorded"]
