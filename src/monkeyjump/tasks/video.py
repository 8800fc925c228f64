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
    "video_action": "action_sequence action_prediction action_antonym fine_grained_action unexpected_action "
    "object_existence object_interaction object_shuffle",
    "video_motion": "moving_direction action_localization scene_transition action_count moving_count moving_attribute",
    "video_reasoning": "state_change character_order egocentric_navigation episodic_reasoning counterfactual_inference",
}
_FOLDERS = {  # of the clips, as the benchmark's own loader has them
    "star/Charades_v1_480": "action_sequence action_prediction object_interaction",
    "clevrer/video_validation": "object_existence moving_direction moving_count moving_attribute "
    "counterfactual_inference",
    "perception/videos": "object_shuffle action_count state_change character_order",
    "ssv2_video": "action_antonym",
    "Moments_in_Time_Raw/videos": "fine_grained_action",
    "FunQA_test/test": "unexpected_action",
    "sta/sta_video": "action_localization",
    "scene_qa/video": "scene_transition",
    "vlnqa": "egocentric_navigation",
    "tvqa/frames_fps3": "episodic_reasoning",
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


def _task(name: str, family: str) -> Task:
    folder = next(folder for folder, names in _FOLDERS.items() if name in names.split())
    source = HubSource(
        "Srikant86/MVTamperBench",
        name,
        splits={"train": "train", "test": "train"},
        held_out=5 / 12,
        group=original_of,
        media=f"video/{folder}",
        unpack="cd {}/video && unzip -n '*.zip'",
    )
    description = f"tampered clips: {name.replace('_', ' ')}"
    return Task(name, family, render_tampering, ("answer",), source, None, "accuracy", "video", description, ("video",))


VIDEO_TASKS: tuple[Task, ...] = tuple(
    _task(name, family) for family, names in _FAMILIES.items() for name in names.split()
)
