"""Take the finished runs of a grid from one machine to another, as one file of their records.

    python benchmarks/cells.py pack runs/text14 cells.json
    python benchmarks/cells.py unpack cells.json runs/text14 --data DIR

The same `monkeyjump compare` or `ablate` then makes what is missing. Folders of data are left out of the file. Adapters
stay where they are: a run of the search whose adapter is not there is trained again for its test.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from monkeyjump.record import write_atomic


def pack(folder: Path, file: Path) -> None:
    cells = {}
    for path in sorted(folder.glob("cells/**/record.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["status"] == "finished":
            record["config"]["data"]["folder"] = record["config"]["output"] = None
            record["command"] = []  # that of the process which was told to make it
            cells[path.parent.relative_to(folder).as_posix()] = record
    write_atomic(file, json.dumps({"cells": cells}, indent=0) + "\n")
    print(f"{len(cells)} runs in {file}")


def unpack(file: Path, folder: Path, data: str | None) -> None:
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    for path, record in cells.items():
        record["config"]["data"]["folder"] = data
        write_atomic(folder / path / "record.json", json.dumps(record, indent=1) + "\n")
    print(f"{len(cells)} runs in {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, names in (("pack", ("folder", "file")), ("unpack", ("file", "folder"))):
        own = verbs.add_parser(verb)
        for name in names:
            own.add_argument(name, type=Path)
    verbs.choices["unpack"].add_argument("--data", help="the folder of the tasks' files here")
    options = parser.parse_args()
    if options.verb == "pack":
        pack(options.folder, options.file)
    else:
        unpack(options.file, options.folder, options.data)


if __name__ == "__main__":
    main()
