"""Settings of the documentation site: `make docs` builds it into build/docs."""

project = "monkeyjump"
author = "the authors of monkeyjump"
project_copyright = "the authors of monkeyjump, Apache-2.0"
extensions = ["myst_parser"]
highlight_language = "none"  # of blocks that name no language: commands
html_theme = "furo"
html_title = "monkeyjump"
myst_heading_anchors = 3  # links such as reference.md#pictures-and-clips, as GitHub has them
suppress_warnings = ["misc.highlighting_failure"]  # languages of code that Pygments lacks stay plain
exclude_patterns = ["make_*.py"]
