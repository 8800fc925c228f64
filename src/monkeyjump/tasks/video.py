"""MVTamperBench as rows: which tampering does a clip show, in 19 kinds of scenes and the paper's three groups.

The hub has one configuration and one split for each kind, about 1,200 clips: 200 originals and five tampered copies of
each. The paper says 13,300 training clips (700 a task) and 500 test clips a task: together the whole set. Five twelfths
are therefore held out here, but whole originals with their copies, so that no scene is seen in training and in test.
"""

from __future__ import annotations

import re

from monkeyjump.tasks.cells import Row, listed, pick
from monkeyjump.tasks.task import Example, HubSource, Task

TAMPERINGS = ("original", "masking", "repetition", "substitution", "dropping", "rotate")
_FAMILIES = {
    # kind: the folder of its clips, as the benchmark's own loader has it
    "video_action": {
        "action_sequence": "star/Charades_v1_480",
        "action_prediction": "star/Charades_v1_480",
        "action_antonym": "ssv2_video",
        "fine_grained_action": "Moments_in_Time_Raw/videos",
        "unexpected_action": "FunQA_test/test",
        "object_existence": "clevrer/video_validation",
        "object_interaction": "star/Charades_v1_480",
        "object_shuffle": "perception/videos",
    },
    "video_motion": {
        "moving_direction": "clevrer/video_validation",
        "action_localization": "sta/sta_video",
        "scene_transition": "scene_qa/video",
        "action_count": "perception/videos",
        "moving_count": "clevrer/video_validation",
        "moving_attribute": "clevrer/video_validation",
    },
    "video_reasoning": {
        "state_change": "perception/videos",
        "character_order": "perception/videos",
        "egocentric_navigation": "vlnqa",
        "episodic_reasoning": "tvqa/frames_fps3",
        "counterfactual_inference": "clevrer/video_validation",
    },
}


def render_tampering(row: Row) -> Example:
    """The answer is the text of an option; rows without options are asked for the benchmark's six."""
    options = tuple(map(str, listed(row["candidates"], "candidates"))) if row.get("candidates") else TAMPERINGS
    question = str(row.get("question") or "What tampering does this video exhibit?").strip()
    return Example(question=question, options=options, label=pick(row["answer"], options))


def original_of(row: Row) -> str:
    """The name of the clip that a tampered one was made from, which begins its own."""
    name = str(row["video"]).rsplit("/", 1)[-1].rsplit(".", 1)[0]
    return re.split(r"_(?:start_|middle_|end_)?(?:tampered|dropp|mask|repeti|rotat|substitut)", name)[0]


def _source(name: str, folder: str) -> HubSource:
    return HubSource(
        "Srikant86/MVTamperBench",
        name,
        splits={"train": "train", "test": "train"},
        held_out=5 / 12,
        group=original_of,
        media=f"video/{folder}",
        unpack="cd {}/video && unzip -n '*.zip'",
    )


VIDEO_TASKS: tuple[Task, ...] = tuple(
    Task(
        name=name,
        family=family,
        render=render_tampering,
        fields=("answer",),
        source=_source(name, folder),
        modality="video",
        description=f"tampered clips: {name.replace('_', ' ')}",
        media=("video",),
    )
    for family, kinds in _FAMILIES.items()
    for name, folder in kinds.items()
)
