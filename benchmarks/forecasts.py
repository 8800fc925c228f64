"""What `forecast` says of mixtures whose conflict is known, and of the real ones.

    python benchmarks/forecasts.py --data DIR --draws 3 --output forecasts.json

Known are the rules of `study conflict`: the answers of two rules agree by 1 at conflict 0, and by -1 / (rules - 1) at
conflict 1 if there are up to four of them. Every mixture is written to the record when it is done.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from monkeyjump.experiments.conflict import RECIPE
from monkeyjump.experiments.conflict_tasks import Setting, write_tasks
from monkeyjump.experiments.forecast import forecast
from monkeyjump.record import RunRecord, write_record
from monkeyjump.training.recipe import Recipe, load_recipe, overridden
from monkeyjump.training.shared import Shared

PLACES = [Setting(conflict, 4, 1, "given") for conflict in (0, 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="settings of all recipes, e.g. train.bf16=true")
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--output", default="forecasts.json")
    options = parser.parse_args()
    settings = [*options.overrides, "adapter.init_tokens=5000"]
    rules = overridden(Recipe(), [*RECIPE, *settings])
    with tempfile.TemporaryDirectory() as folder:
        recipes = {str(s.data): rules.model_copy(update={"tasks": write_tasks(s, Path(folder))}) for s in PLACES}
        recipes["text14-study"] = load_recipe("text14-study", [*settings, f"data.folder={options.data}"])
        shared, record = Shared(), RunRecord(kind="forecasts", name="forecasts", config={"settings": settings})
        for name, recipe in recipes.items():
            began = time.perf_counter()
            found = forecast(recipe, options.rows, options.draws, shared)
            record.metrics[name] = {**found.to_dict(), "seconds": round(time.perf_counter() - began, 1)}
            write_record(record, options.output)
            print(
                f"{name:16} {found.agreement:+.2f} ±{found.standard_error or 0:.2f}  bits {found.bits:.3f}", flush=True
            )


if __name__ == "__main__":
    main()
