"""The tables of measurements in docs/*.md, from records: `python docs/make_results.py`.

A line `<!-- table: KIND NAME -->` is followed by a table up to the next empty line. Everything else is written by hand.
KIND is `methods` or `tasks` of a comparison, `routed` of one, which is MJ-LoRA against all others, `study`, `effects`
or `costs` of a study, `map`, `together` or `place` of a map, `pictures`, `serving`, or has no name: `forecasts` of all
mixtures, `advice` of them beside what training found, `claims`, every claim of the paper that a study tests, and
`headlines`, what its summary says, with what became of it. A line `<!-- figure: study NAME -->` stands above the
picture of a study, and `<!-- figure: map NAME -->` above that of a map.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

from PIL import Image

from monkeyjump.errors import ConfigError
from monkeyjump.evaluation.metrics import Interval, holm, paired_difference
from monkeyjump.experiments.ablate import EQUAL, choice_effects, plot_study, verdicts
from monkeyjump.experiments.conflict_map import plot_map
from monkeyjump.experiments.conflict_tasks import Setting
from monkeyjump.experiments.forecast import Forecast
from monkeyjump.experiments.study import Study, load_study, names
from monkeyjump.experiments.tables import digest, spread
from monkeyjump.methods.presets import COMPARED
from monkeyjump.record import read_record, write_atomic
from monkeyjump.tables import Table

FIGURE = re.compile(r"<!-- figure: (?:study|map) ([\w.-]+) -->\n!\[[^]]*\]\((pictures/[\w.-]+)\)\n")
BLOCK = re.compile(r"(<!-- table: (\w+) ?([\w.-]*) -->\n)(?:.+\n)*")


def rendered(text: str, records: Path) -> str:
    """The page with every table made anew."""

    def made(block: re.Match[str]) -> str:
        head, kind, name = block.groups()
        if kind not in TABLES:
            raise ConfigError(f"table: {kind} is not known: choose among {', '.join(TABLES)}.")
        return f"{head}{TABLES[kind](records, name).markdown()}\n"

    return BLOCK.sub(made, text)


def outdated(text: str, home: Path, records: Path) -> list[tuple[dict[str, Any], Path]]:
    """The pictures of a page that were not made from their records as these are, with what they are to be made from."""
    found = []
    for name, place in FIGURE.findall(text):
        metrics, path = _metrics(records, name), home / place
        if _made_from(path) != digest(metrics["rows"]):
            found.append((metrics, path))
    return found


def _made_from(picture: Path) -> str | None:
    """What a picture says of the numbers that it shows; None for one that is not there."""
    if not picture.is_file():
        return None
    with Image.open(picture) as image:
        return image.info.get("Description")


def _metrics(records: Path, name: str) -> dict[str, Any]:
    return read_record(records / f"{name}.json").metrics


def _percent(values: list[float]) -> str:
    return f"{100 * fmean(values):.1f}" + (f" ± {100 * spread(values):.1f}" if len(values) > 1 else "")


def _against(values: list[float], base: list[float], p: float, scale: float = 100) -> str:
    found = paired_difference(values, base)
    if found.n < 2:
        return f"{scale * found.mean:+.1f}"
    low, high = scale * found.interval.low, scale * found.interval.high
    return f"{scale * found.mean:+.2f} [{low:+.2f}, {high:+.2f}], p {p:.3f}"


def _methods(records: Path, name: str) -> Table:
    """A line for each method: mean, difference to the first with interval and corrected p, rate, size."""
    metrics = _metrics(records, name)
    methods, means = metrics["methods"], metrics["results"]["mean"]
    base = means[methods[0]]
    others = methods[1:]
    p_values = holm([paired_difference(means[method], base).p_value for method in others])
    corrected = dict(zip(others, p_values, strict=True))
    rows = [["zero-shot", "", "", _percent([fmean(metrics["base"].values())]), ""]] if _scored(metrics) else []
    for method in methods:
        against = _against(means[method], base, corrected[method]) if method in corrected else ""
        cost = metrics["costs"][method]
        rows.append([method, f"{cost['lr']:g}", f"{cost['trainable']:,}", _percent(means[method]), against])
    return Table("", ["method", "lr", "trainable", "mean", f"less {methods[0]}"], rows)


def _routed(records: Path, name: str) -> Table:
    """MJ-LoRA less every other method, in points and in NLL, each with interval and p corrected for all of them."""
    metrics, columns = _metrics(records, name), []
    others = [method for method in metrics["methods"] if method != "mjlora"]
    for found, scale in ((metrics["results"]["mean"], 100.0), (metrics["nll"], 1000.0)):
        routed = found["mjlora"]
        p_values = holm([paired_difference(routed, found[other]).p_value for other in others])
        columns.append([_against(routed, found[o], p, scale) for o, p in zip(others, p_values, strict=True)])
    failed = [str(metrics["costs"][other]["failed"]) for other in others]
    rows = [list(row) for row in zip(others, *columns, failed, strict=True)]
    return Table("", ["MJ-LoRA less", "points", "NLL x 1000", "failed runs of it"], rows)


def _scored(metrics: dict[str, Any]) -> bool:
    return all(value is not None for value in (metrics.get("base") or {"": None}).values())


def _tasks(records: Path, name: str) -> Table:
    """A line for each method, a column for each task, in per cent."""
    metrics = _metrics(records, name)
    tasks = [task for task in metrics["results"] if not task.endswith("mean")]
    rows = [
        [label, *("" if found.get(task) is None else f"{100 * found[task]:.1f}" for task in tasks)]
        for label, found in (("majority", metrics.get("majority")), ("zero-shot", metrics.get("base")))
        if found and any(value is not None for value in found.values())
    ]
    for method in metrics["methods"]:
        rows.append([method, *(f"{100 * fmean(metrics['results'][task][method]):.1f}" for task in tasks)])
    return Table("", ["", *tasks], rows)


def _study(records: Path, name: str) -> Table:
    """A line for each variant: mean, difference to the reference with interval and corrected p, NLL, failures."""
    found = _metrics(records, name)["rows"]
    reference = found[0]
    p_values = holm([paired_difference(row["values"], reference["values"]).p_value for row in found[1:]])
    rows = []
    for row, p in zip(found, [None, *p_values], strict=True):
        against = "" if p is None else _against(row["values"], reference["values"], p)
        nll = "" if row["nll"] is None else f"{row['nll']:.3f}"
        failed = row.get("failed", row.get("diverged"))  # the first records count only what diverged
        rows.append([row["variant"], f"{row['lr']:g}", _percent(row["values"]), against, nll, str(failed)])
    return Table("", ["variant", "lr", "mean", f"less {reference['variant']}", "NLL", "failed"], rows)


def _effects(records: Path, name: str) -> Table:
    """What each name of a study of combinations adds."""
    metrics = _metrics(records, name)
    found = choice_effects(Study(**metrics["study"]), metrics["rows"])
    if found is None:
        raise ConfigError(f"table: effects {name}: its variants do not tell the names apart.")
    return found


def _costs(records: Path, name: str) -> Table:
    """What every method trains, what of that is its router, and the rest as a multiple of its base adapter.

    Beside it are time and memory of a captured step over those of the frozen model, for the methods that have them.
    """
    found = {row["variant"]: row for row in _metrics(records, name)["rows"]}
    timed = [row for one in STEPS for row in _metrics(records, one)["rows"] if row["mode"] == "graph"]
    steps = {row["variant"]: row for row in reversed(timed) if row.get("median_ms")}  # the first
    rows = []
    for method, row in found.items():
        times = (row["trainable"] - row["router"]) / found[BASES.get(method, "lora")]["trainable"]
        step = [f"{steps[method][key]:.3f}" for key in ("time_vs_floor", "memory_vs_floor")] if method in steps else []
        rows.append([method, f"{row['trainable']:,}", f"{row['router']:,}", f"{times:.2f}", *(step or ["", ""])])
    columns = ["method", "trainable", "of the router", "the rest / base adapter", "step / floor", "memory / floor"]
    return Table("", columns, rows)


def _map(records: Path, name: str) -> Table:
    """The accuracy of the constant gate, gains over it in points, and the forecast: a line a place."""
    metrics, rows = _metrics(records, name), []
    gains = [gain for gain in metrics["gains"] if gain["reference"] == "constant gate"]
    for place in metrics["places"]:
        here = {gain["method"]: gain for gain in gains if gain["setting"] == place}
        cells = []
        for method in metrics["methods"]:
            error = here[method]["points"]["standard_error"]
            text = f"{100 * here[method]['points']['mean']:+.1f}" + (f" ± {100 * error:.1f}" if error else "")
            certain = here[method]["corrected"] is not None and here[method]["corrected"] < 0.01
            cells.append(f"{text} *" if certain else text)
        words = [place["cue"], f"{place['conflict']:g}", str(place["rules"]), str(place["rank"])]
        own = {row["method"]: row["mean"] for row in metrics["rows"] if all(row[key] == place[key] for key in place)}
        said = _agreement(_forecast(metrics["forecasts"][Setting(**place).data]))
        rows.append([*words, f"{100 * own['constant gate']:.1f}", *cells, said])
    return Table("", ["cue", "conflict", "rules", "rank", "constant gate", *metrics["methods"], "agreement"], rows)


def _together(records: Path, name: str) -> Table:
    """Gains over the constant gate, the mean of all places of a number of rules: a line a method, paired by seed."""
    metrics = _metrics(records, name)
    counts = sorted({place["rules"] for place in metrics["places"]})
    found: dict[tuple[str, int], list[float]] = {}  # the mean of each seed
    for method in ("constant gate", "lora", *metrics["methods"]):
        for rules in counts:
            own = [row["values"] for row in metrics["rows"] if (row["method"], row["rules"]) == (method, rules)]
            found[method, rules] = [fmean(seed) for seed in zip(*own, strict=True)]
    lines = {
        key: (values, found["constant gate", key[1]]) for key, values in found.items() if key[0] != "constant gate"
    }
    p_values = holm([paired_difference(*pair).p_value for pair in lines.values()])
    told = {key: _against(*pair, p) for (key, pair), p in zip(lines.items(), p_values, strict=True)}
    rows = [[method, *(told[method, rules] for rules in counts)] for method in ("lora", *metrics["methods"])]
    return Table("", ["method", *(f"{rules} rules" for rules in counts)], rows)


def _place(records: Path, name: str) -> Table:
    """The first place of a map, a line a method: less the constant gate, with interval and corrected p."""
    metrics = _metrics(records, name)
    rows = [row for row in metrics["rows"] if all(row[key] == value for key, value in metrics["places"][0].items())]
    base, others = rows[0], rows[1:]
    lines = [[base["method"], f"{base['lr']:g}", _percent(base["values"]), "", f"{base['nll']:.3f}", ""]]
    columns = []
    for key, scale in (("values", 100.0), ("nlls", 1000.0)):
        p_values = holm([paired_difference(row[key], base[key]).p_value for row in others])
        columns.append([_against(row[key], base[key], p, scale) for row, p in zip(others, p_values, strict=True)])
    for row, points, nll in zip(others, *columns, strict=True):
        lines.append([row["method"], f"{row['lr']:g}", _percent(row["values"]), points, f"{row['nll']:.3f}", nll])
    less = f"less {base['method']}"
    return Table("", ["method", "lr", "accuracy", less, "NLL", f"{less}, x 1000"], lines)


def _forecasts(records: Path, name: str) -> Table:
    """What was said before training of every mixture that has a record."""
    rows = []
    for path in sorted(records.glob("forecast-*.json")):
        record = read_record(path)
        found = record.metrics
        by_prompt = "" if (bits := found.get("prompt_bits")) is None else f"{bits:.3f}"
        counts = [str(len(found["tasks"])), f"{found['rows']} x {len(found['draws'])}"]
        rows.append([record.name, *counts, _agreement(_forecast(found)), f"{found['bits']:.3f}", by_prompt])
    return Table("", ["mixture", "tasks", "rows", "agreement", "bits, recipe", "bits, by prompt"], rows)


def _advice(records: Path, name: str) -> Table:
    """What a forecast advises for mixtures that were trained, and what their routed methods have more than LoRA."""
    rows = []
    for said, (done, routed) in TRAINED.items():
        record, means = read_record(records / f"{said}.json"), _means(records, done)
        found = _forecast(record.metrics)
        advised = re.search(r"method=(\w+)", found.advice)
        gains = [f"{variant} {_gain(means[variant], means['lora'])}" for variant in routed]
        bits = f"{found.prompt_bits:.3f}" if "prompt_bits" in record.metrics else ""
        words = [record.name, _agreement(found), bits]
        rows.append([*words, advised[1] if advised else "more rows", "; ".join(gains)])
    return Table("", ["mixture", "agreement", "bits, by prompt", "advice", "less LoRA, points"], rows, left=5)


def _forecast(metrics: dict[str, Any]) -> Forecast:
    known = {part.name for part in fields(Forecast)}
    return Forecast(**{key: value for key, value in metrics.items() if key in known})


def _agreement(found: Forecast) -> str:
    """Of the tasks whose halves agree, and how many these are."""
    known, every = len(found.known), len(found.tasks)
    agreement, error = found.agreement_of_known if known > 1 else (found.agreement, found.standard_error)
    words = f"{agreement:+.2f}" + ("" if error is None else f" ± {error:.2f}")
    return words if known in (1, every) else f"{words} ({known} of {every})"


def _gain(values: list[float], base: list[float]) -> str:
    found = paired_difference(values, base)
    return f"{100 * found.mean:+.1f} (one seed)" if found.n < 2 else _interval(found.interval)


def _means(records: Path, name: str) -> dict[str, list[float]]:
    """The mean of every seed by method or variant, of a comparison, a study or the pictures."""
    content = json.loads((records / f"{name}.json").read_text(encoding="utf-8"))
    if "runs" in content:
        return {variant: [run["mean"] for run in runs] for variant, runs in content["runs"].items()}
    metrics = content["metrics"]
    if "results" in metrics:
        return metrics["results"]["mean"]
    return {row["variant"]: row["values"] for row in metrics["rows"]}


def _pictures(records: Path, name: str) -> Table:
    """A line for each variant of benchmarks/pictures.py: its tasks in per cent, and MJ-LoRA's mean less its own."""
    record = json.loads((records / f"{name}.json").read_text(encoding="utf-8"))
    tasks, probe = list(record["probe"]), record["probe"]
    rows = []
    for word, label in (("chance", "majority"), ("probe", "linear probe")):
        known = [f"{probe[task][word]:.1f}" if word in probe[task] else "" for task in tasks]
        rows.append([label, *known, "", ""])
    means = {variant: [run["mean"] for run in runs] for variant, runs in record["runs"].items()}
    routed, others = means["mjlora"], [variant for variant in means if variant != "mjlora"]
    p_values = dict(zip(others, holm([paired_difference(routed, means[v]).p_value for v in others]), strict=True))
    for variant, runs in record["runs"].items():
        cells = [f"{100 * fmean(run['tasks'][task] for run in runs):.1f}" for task in tasks]
        less = _against(routed, means[variant], p_values[variant]) if variant in p_values else ""
        rows.append([variant, *cells, _percent(means[variant]), less])
    return Table("", ["", *(task.removesuffix("_set") for task in tasks), "mean", "mjlora less this"], rows)


def _serving(records: Path, name: str) -> Table:
    """A line for each way to serve and number of clients of benchmarks/serve_speed.py, as means of the turns."""
    record = json.loads((records / f"{name}.json").read_text(encoding="utf-8"))
    speeds: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in record["rows"]:
        by_side = speeds.setdefault((row["way"], row["clients"]), {})
        by_side.setdefault(row["side"], []).append(row["tokens_per_second"])
    rows = []
    for (way, clients), sides in speeds.items():
        base, routed = fmean(sides["base"]), fmean(sides["mjlora"])
        words = f"{'continuous batching' if way == 'together' else way}, {clients} client{'s' * (clients > 1)}"
        turns = ", ".join(f"{a / b:.2f}" for a, b in zip(sides["mjlora"], sides["base"], strict=True))
        rows.append([words, f"{base:,.0f}", f"{routed:,.0f}", f"{routed / base:.2f}", turns])
    return Table("", ["tokens/s", "base model", "MJ-LoRA", "share", "of each turn"], rows)


def _claims(records: Path, name: str) -> Table:
    """Every claim that a study tests; `study-NAME.json` is its record."""
    rows = []
    for study_name in names():
        study, record = load_study(study_name), records / f"study-{study_name}.json"
        if not study.claim:
            continue
        if record.is_file():
            metrics = read_record(record).metrics
            done = verdicts(Study(**metrics["study"]), metrics["rows"]) or [("", "see its figures")]
            if study_name == "complexity":
                done = [_as_many(metrics["rows"])]
            rows += [[study.title, study.claim, words, verdict] for words, verdict in done]
        else:
            rows.append([study.title, study.claim, "", "not run"])
    return Table("", ["study", "the paper", "here, points with 95 % interval", "verdict"], rows, left=4)


def _as_many(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Whether routed adapters train as much as plain ones, and nothing else; what a step costs is another table."""
    found = {row["variant"]: row for row in rows}
    equal = all(found[routed]["trainable"] == found[plain]["trainable"] for routed, plain in PLAIN.items())
    none = not any(found[routed]["router"] for routed in PLAIN)
    words = f"{'as many' if equal else 'another number'}, {'no' if none else 'a'} router"
    return words, f"{'holds' if equal and none else 'does not hold'} of parameters; costs below"


def _interval(found: Interval) -> str:
    return f"{50 * (found.low + found.high):+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


SAME_ADAPTER = {
    "mjlora": "moelora",
    "mjlorafa": "moe_lora_fa",
    "mjadalora": "moe_adalora",
    "mjpropulsion": "moe_propulsion",
}
PLAIN = {"mjlora": "lora", "mjlorafa": "lora_fa", "mjadalora": "adalora", "mjpropulsion": "propulsion"}
MIXED = [name for name in COMPARED if name not in {*PLAIN, *PLAIN.values()}]
# the adapter that a method has one or several of, where it is not LoRA
BASES = {name: name for name in PLAIN.values()} | PLAIN | {SAME_ADAPTER[name]: base for name, base in PLAIN.items()}
DECODING = "bench-inference-mixtures-qwen2-0.5b-h200"
STEP, ALL_METHODS = "bench-step-qwen2-0.5b-h200", "compare-builtin17-smollm2-135m-h200"
# what was not in it, each over the frozen model of its own run
STEPS = (STEP, "bench-step-lora-fa-qwen2-0.5b-h200", "bench-step-moa-adalora-qwen2-0.5b-h200")
# what was forecast, and what was trained on the same mixture, with the methods that route
TRAINED = {
    "forecast-reviews-smollm2-135m-cpu": ("opposed-reviews-smollm2-135m-h200", ("oracle", "sequence")),
    "forecast-phrases-smollm2-135m-cpu": ("groups-phrases-smollm2-135m-cpu", ("by the task", "by the prompt")),
    "forecast-rules-128-rows-smollm2-135m-cpu": (
        "conflict-by-prompt-again-smollm2-135m-h200",
        ("oracle", "one of three, still"),
    ),
    "forecast-text14-256-rows-smollm2-135m-cpu": (
        "compare-text14-study-smollm2-135m-h200",
        ("mjlora", "mjlora_oracle"),
    ),
    "forecast-quickstart-smollm2-135m-cpu": ("defaults-smollm2-135m-cpu", ("groups by the prompt", "paper")),
}
SCORES = 3  # claims of the summary that are about scores
TEXT, IMAGES = "compare-text14-study-smollm2-135m-h200", "pictures-vlm-tiny-h200"
MIXTURES = "compare-text14-methods-smollm2-135m-h200"  # with one seed
MIXTURE = "moa"  # the best of LoRAs among those; it has five


def _headlines(records: Path, name: str) -> Table:
    """What the paper's summary says of Monkey Jump, what the records say, and which."""
    compared = _metrics(records, ALL_METHODS)
    size = {method: cost["trainable"] for method, cost in compared["costs"].items()}
    step = {row["variant"]: row for row in _metrics(records, STEP)["rows"] if row["mode"] == "graph"}
    times = [size[mixture] / size[routed] for routed, mixture in SAME_ADAPTER.items()]
    most = step["moelora"]["trainable"] / step["mjpropulsion"]["trainable"]
    slower = [step["moelora"]["median_ms"] / step[routed]["median_ms"] for routed in SAME_ADAPTER]
    saved = [1 - step[routed]["peak_bytes"] / step["moelora"]["peak_bytes"] for routed in SAME_ADAPTER]
    equal = all(size[routed] == size[plain] for routed, plain in PLAIN.items())
    text, images = _means(records, TEXT), _means(records, IMAGES)
    on_text, mixture = (paired_difference(text["mjlora"], text[other], SCORES).interval for other in ("lora", MIXTURE))
    once = _means(records, MIXTURES)
    less = [100 * (once["mjlora"][0] - once[other][0]) for other in MIXED if other != MIXTURE]
    on_images = paired_difference(images["mjlora"], images["lora"], SCORES).interval
    enough = sum(ratio >= 7 for ratio in times)
    rows = [
        [
            "as many trainable parameters as the base adapter",
            f"{'the same' if equal else 'others'} for all four adapters",
            ALL_METHODS,
            "holds" if equal else "does not hold",
        ],
        [
            "7 to 29 times fewer of them than mixtures",
            f"{most:.1f} (MJ-Propulsion and MoELoRA); {_range(times, '.1f')} where both have the same kind of adapter",
            f"{STEP}, {ALL_METHODS}",
            f"holds across kinds; of one kind in {enough} of {len(times)}",
        ],
        [
            "up to 48 % less peak memory than mixtures",
            f"{_range([100 * share for share in saved], 'z.1f')} % less than MoELoRA",
            STEP,
            "holds" if max(saved) >= 0.48 else "does not hold",
        ],
        [
            "1.5 to 2 times faster training than mixtures",
            f"a captured step of MoELoRA takes {_range(slower, '.2f')} times as long",
            STEP,
            "holds" if min(slower) >= 1.5 else "holds in part" if max(slower) >= 1.5 else "does not hold",
        ],
        ["10 to 25 % more throughput at inference than mixtures", *_throughput(records)],
        ["MJ-LoRA beats LoRA on text, by 0.3 to 0.5 points", *_beats(on_text, TEXT)],
        ["MJ-LoRA beats LoRA on images, by 1.2 points", *_beats(on_images, IMAGES)],
        [
            "as good as mixtures, on text",
            f"{_interval(mixture)} points to MoA; {_range(less, '+.1f')} to {len(less)} others, with one seed",
            f"{TEXT}, {MIXTURES}",
            "holds" if mixture.low > -EQUAL else "does not hold" if mixture.high < -EQUAL else "undecided",
        ],
    ]
    return Table("", ["the paper", "here", "record", "verdict"], rows, left=4)


def _throughput(records: Path) -> list[str]:
    """Tokens decoded in a second with MJ-LoRA, more than with each mixture of the record, if it is there."""
    if not (records / f"{DECODING}.json").is_file():
        return ["", "", "not measured"]
    rows = [row for row in _metrics(records, DECODING)["rows"] if row["mode"] == "decode-graph"]
    speeds = {row["variant"]: row["tokens_per_second"] for row in rows}
    routed, others = speeds["mjlora"], speeds.keys() - {"mjlora", "floor", "peft-lora"}
    gains = [routed / speeds[other] - 1 for other in others]
    verdict = "holds" if min(gains) >= 0.1 else "holds in part" if max(gains) >= 0.1 else "does not hold"
    return [f"{_range([100 * gain for gain in gains], 'z.0f')} % more than {len(gains)} mixtures", DECODING, verdict]


def _range(values: list[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def _beats(gain: Interval, record: str) -> list[str]:
    verdict = "holds" if gain.low > 0 else "does not hold" if gain.high < 0 else "undecided"
    return [f"{_interval(gain)} points", record, verdict]


TABLES = {
    "methods": _methods, "tasks": _tasks, "routed": _routed, "study": _study, "effects": _effects, "costs": _costs,
    "map": _map, "together": _together, "place": _place, "pictures": _pictures, "serving": _serving,
    "forecasts": _forecasts, "advice": _advice, "claims": _claims, "headlines": _headlines,
}  # fmt: skip


if __name__ == "__main__":
    home = Path(__file__).parent
    records = home.parent / "benchmarks" / "results"
    for page in home.glob("*.md"):
        before = page.read_text(encoding="utf-8")
        if (after := rendered(before, records)) != before:
            write_atomic(page, after)
        for metrics, path in outdated(after, home, records):
            if "places" in metrics:
                plot_map(metrics, path)
            else:
                plot_study(Study(**metrics["study"]), metrics["rows"], path)
