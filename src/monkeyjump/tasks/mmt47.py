"""MMT-47, the mixture that the paper's authors publish: one training split, and a test split for each of 47 tasks.

`tasks: [mmt47]` trains on `mmt47_train`, whose rows are texts, pictures and clips, and scores each test split by
itself. Questions come with their options written out and answers are short texts, so that all answers are free.
"""

from __future__ import annotations

from dataclasses import replace

from monkeyjump.tasks.cells import BadLabelError, Row, missing, number, pick
from monkeyjump.tasks.task import MODALITIES, Example, HubSource, Metric, Modality, Split, Task
from monkeyjump.tasks.video import VIDEO_TASKS

_SPLITS: dict[str, tuple[Modality, str]] = {  # how names of test splits begin: what they hold, and their tasks
    "image_test": (
        "image",
        "chartqa okvqa scienceqa seed_bench text_recognition textvqa vizwiz_vqa vqa_rad caltech101 eurosat flowers102 "
        "pets svhn camelyon",
    ),
    "text_test": ("text", "arc_challenge arc_easy boolq hellaswag openbookqa piqa social_i_qa winogrande"),
    "glue_test": ("text", "sst2 qnli qqp cola mrpc stsb"),
    "video_test": ("video", " ".join(task.name for task in VIDEO_TASKS)),
}
_METRICS: dict[str, Metric] = {"chartqa": "relaxed_accuracy", "stsb": "spearman"}
_UNPACK = (
    "(cd {0}/images && unzip -n '*.zip'); hf download Srikant86/MVTamperBench --repo-type dataset --include 'video/*' "
    "--local-dir {0}/videos; (cd {0}/videos/video && unzip -n '*.zip')"
)


def _kind(row: Row) -> Modality:
    return MODALITIES[pick(row["source_type"], MODALITIES)]


def _question(row: Row) -> Example:
    if missing(row["answer"]):
        raise BadLabelError("the answer is empty")
    return Example(question=str(row["question"]).strip(), free_answer=str(row["answer"]).strip())


def _similarity(row: Row) -> Example:
    """STS-B: the answer is a number, which is compared by rank."""
    score = number(row["answer"])
    if score is None:
        raise BadLabelError(f"answer {row['answer']!r} is no number")
    return replace(_question(row), score=score)


def _task(name: str, split: str, modality: Modality, absent: tuple[Split, ...], family: str) -> Task:
    media = () if modality == "text" else ("media_path",)
    splits = {"train" if absent == ("test",) else "test": split}
    return Task(
        name=f"mmt47_{name}",
        family=family,
        render=_similarity if name == "stsb" else _question,
        fields=("source_type", "question", "answer"),
        source=HubSource("Kowsher/MMT-47", splits=splits, unpack=_UNPACK if media else ""),
        metric=_METRICS.get(name, "exact_match"),
        modality=modality,
        description=f"split {split} of MMT-47",
        media=media,
        kind=_kind,
        absent=absent,
    )


MMT47_TASKS: tuple[Task, ...] = (
    _task("train", "train", "video", ("test",), "mmt47"),
    *(
        _task(name, f"{start}_{name}", modality, ("train", "validation"), f"mmt47_{start.removesuffix('_test')}")
        for start, (modality, names) in _SPLITS.items()
        for name in names.split()
    ),
)
