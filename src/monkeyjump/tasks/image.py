"""The paper's image tasks as rows: classification after VTAB, and questions about pictures.

`image14` is the paper's table of datasets, which is also the list of its result tables. Its text names two more,
Retinopathy and KITTI-Dist, without a result; they are here outside the group. Columns, label values and splits are the
hub's. Where a dataset has one labelled split (OK-VQA, VizWiz, SEED-Bench, KITTI), a part of it is held out as test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from monkeyjump.tasks.cells import BadLabelError, Row, as_position, listed, most_frequent, pick
from monkeyjump.tasks.task import LETTERS, Example, HubSource, Metric, Task

_SHORT = "Answer the question using a single word or phrase."  # LLaVA's prompt for short answers

_PETS = """abyssinian, american bulldog, american pit bull terrier, basset hound, beagle, bengal, birman, bombay, boxer,
british shorthair, chihuahua, egyptian mau, english cocker spaniel, english setter, german shorthaired, great pyrenees,
havanese, japanese chin, keeshond, leonberger, maine coon, miniature pinscher, newfoundland, persian, pomeranian, pug,
ragdoll, russian blue, saint bernard, samoyed, scottish terrier, shiba inu, siamese, sphynx, staffordshire bull terrier,
wheaten terrier, yorkshire terrier"""
_FLOWERS = """pink primrose, hard-leaved pocket orchid, canterbury bells, sweet pea, english marigold, tiger lily,
moon orchid, bird of paradise, monkshood, globe thistle, snapdragon, colt's foot, king protea, spear thistle,
yellow iris, globe-flower, purple coneflower, peruvian lily, balloon flower, giant white arum lily, fire lily,
pincushion flower, fritillary, red ginger, grape hyacinth, corn poppy, prince of wales feathers, stemless gentian,
artichoke, sweet william, carnation, garden phlox, love in the mist, mexican aster, alpine sea holly,
ruby-lipped cattleya, cape flower, great masterwort, siam tulip, lenten rose, barbeton daisy, daffodil, sword lily,
poinsettia, bolero deep blue, wallflower, marigold, buttercup, oxeye daisy, common dandelion, petunia, wild pansy,
primula, sunflower, pelargonium, bishop of llandaff, gaura, geranium, orange dahlia, pink-yellow dahlia,
cautleya spicata, japanese anemone, black-eyed susan, silverbush, californian poppy, osteospermum, spring crocus,
bearded iris, windflower, tree poppy, gazania, azalea, water lily, rose, thorn apple, morning glory, passion flower,
lotus, toad lily, anthurium, frangipani, clematis, hibiscus, columbine, desert-rose, tree mallow, magnolia, cyclamen,
watercress, canna lily, hippeastrum, bee balm, ball moss, foxglove, bougainvillea, camellia, mallow, mexican petunia,
bromelia, blanket flower, trumpet creeper, blackberry lily"""
_CALTECH = """accordion, airplanes, anchor, ant, background google, barrel, bass, beaver, binocular, bonsai, brain,
brontosaurus, buddha, butterfly, camera, cannon, car side, ceiling fan, cellphone, chair, chandelier, cougar body,
cougar face, crab, crayfish, crocodile, crocodile head, cup, dalmatian, dollar bill, dolphin, dragonfly,
electric guitar, elephant, emu, euphonium, ewer, faces, faces easy, ferry, flamingo, flamingo head, garfield, gerenuk,
gramophone, grand piano, hawksbill, headphone, hedgehog, helicopter, ibis, inline skate, joshua tree, kangaroo, ketch,
lamp, laptop, leopards, llama, lobster, lotus, mandolin, mayfly, menorah, metronome, minaret, motorbikes, nautilus,
octopus, okapi, pagoda, panda, pigeon, pizza, platypus, pyramid, revolver, rhino, rooster, saxophone, schooner,
scissors, scorpion, sea horse, snoopy, soccer ball, stapler, starfish, stegosaurus, stop sign, strawberry, sunflower,
tick, trilobite, umbrella, watch, water lilly, wheelchair, wild cat, windsor chair, wrench, yin yang"""
_EUROSAT = """annual crop, forest, herbaceous vegetation, highway, industrial, pasture, permanent crop, residential,
river, sea lake"""
_RETINOPATHY = "none, mild, moderate, severe, proliferative"
_KITTI = "less than 8 meters, 8 to 20 meters, more than 20 meters, no vehicle"


# -- classification -----------------------------------------------------------------------------


def _of_a_class(question: str, options: tuple[str, ...], known: Mapping[str, int], row: Row) -> Example:
    """A class is given by its number, as on the hub, or by its name in any spelling, which is `known`."""
    value = _vehicle(row["label"]) if isinstance(row["label"], list | tuple) else row["label"]
    label = known.get(_letters(value), as_position(value, len(options)))
    if label is None:
        raise BadLabelError(f"label {value!r} is neither a class nor a number below {len(options)}")
    return Example(question=question, options=options, label=label)


def _letters(name: Any) -> str:
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def _vehicle(things: Sequence[Row]) -> int:
    """KITTI: VTAB's class for the distance to the closest car, van or truck; z points away from the camera."""
    ahead = [float(thing["location"][2]) for thing in things if thing["type"] in ("Car", "Van", "Truck")]
    return sum(min(ahead) > limit for limit in (8, 20)) if ahead else 3


# -- questions about pictures -------------------------------------------------------------------

Asked = tuple[Callable[[Row], Example], str]  # a renderer, and the columns that it reads


def _free(question: str, answer: str, hint: str = _SHORT) -> Asked:
    """One right answer, in a cell or in a list of one. Copies of a dataset often rename a column: "a|b" is either."""
    return partial(_answered, question, answer, hint), f"{question} {answer}"


def _answered(question: str, answer: str, hint: str, row: Row) -> Example:
    text = "\n".join(filter(None, (_cell(row, question), hint)))
    return Example(question=text, free_answer=_cell(row, answer))


def _cell(row: Row, columns: str) -> str:
    value = next((row[column] for column in columns.split("|") if column in row), "")
    return str(value[0] if isinstance(value, list | tuple) and value else value).strip()


def _voted(hint: str = _SHORT) -> Asked:
    """The answers of several people, usually ten."""
    return partial(_answered_by_several, hint), "question answers"


def _answered_by_several(hint: str, row: Row) -> Example:
    found = listed(row["answers"], "answers")
    answers = tuple(str(one["answer"] if isinstance(one, Mapping) else one).strip() for one in found)
    if not answers:
        raise BadLabelError("there are no answers")
    question = f"{str(row['question']).strip()}\n{hint}"
    return Example(question=question, free_answer=most_frequent(answers), answers=answers)


def _scienceqa(row: Row) -> Example:
    options = tuple(map(str, listed(row["choices"], "choices")))
    label, hint = pick(row["answer"], range(len(options))), str(row.get("hint") or "").strip()
    return Example(question=str(row["question"]).strip(), options=options, label=label, context=hint)


def _seed_bench(row: Row) -> Example:
    options = tuple(str(row[f"choice_{letter}"]).strip() for letter in "abcd")
    return Example(question=str(row["question"]).strip(), options=options, label=pick(row["answer"], LETTERS[:4]))


# -- the rows -----------------------------------------------------------------------------------


def _hub(name: str, train: str = "train", test: str = "test", **more: Any) -> HubSource:
    """ "owner/name configuration", and the splits; one split for both is parted by `held_out`."""
    id, _, config = name.partition(" ")
    return HubSource(id, config or None, splits={"train": train, "test": test}, **more)


def _class(name: str, hub: HubSource, question: str, classes: str, description: str) -> Task:
    options = tuple(" ".join(name.split()) for name in classes.split(","))
    known = {_letters(option): index for index, option in enumerate(options)}
    render = partial(_of_a_class, question, options, known)
    return Task(name, "image_classes", render, ("label",), hub, options, "accuracy", "image", description, ("image",))


def _ask(name: str, hub: HubSource, asked: Asked, description: str, metric: Metric = "accuracy") -> Task:
    render, fields = asked
    return Task(name, "vision_qa", render, tuple(fields.split()), hub, None, metric, "image", description, ("image",))


_WORD = "What is the text in the image? Answer with the text alone."
_BLIND = f"When the provided information is insufficient, respond with 'Unanswerable'.\n{_SHORT}"
_BY_QUESTION = itemgetter("question_id")
_SEED = "question choice_a choice_b choice_c choice_d answer"
_CAMELYON, _SVHN = _hub("1aurent/PatchCamelyon"), _hub("ufldl-stanford/svhn cropped_digits")
_PET_SET, _FLOWER_SET = _hub("timm/oxford-iiit-pet"), _hub("dpdl-benchmark/oxford_flowers102")
_EUROSAT_SET, _CALTECH_SET = _hub("timm/eurosat-rgb"), _hub("dpdl-benchmark/caltech101")
_CHARTQA, _VQA_RAD = _hub("HuggingFaceM4/ChartQA"), _hub("flaviagiammarino/vqa-rad")
_OKVQA = _hub("lmms-lab/OK-VQA", "val2014", "val2014", held_out=1 / 6, group=_BY_QUESTION)  # a sixth: the paper's 841
_VIZWIZ = _hub("lmms-lab/VizWiz-VQA", "val", "val", held_out=1 / 10, group=_BY_QUESTION)
_TEXTVQA = _hub("lmms-lab/textvqa", test="validation")
_SEED_BENCH = _hub("lmms-lab/SEED-Bench", "test", "test", held_out=1 / 6, group=itemgetter("data_id"))
# a revision that still lists the training split
_SCIENCEQA = _hub("lmms-lab/ScienceQA ScienceQA-IMG", revision="7d5be0f9a868f835ee26f74cba3baa743c1be07d")
_WORDS = _hub("MiXaiLL76/IIIT5K_OCR")  # the paper does not say which words; IIIT-5K is the classic set
_CARS = _hub("nateraw/kitti", "train", "train", held_out=1 / 10)
_TISSUE = "Is the lymph node tissue in this image normal, or does it contain tumor?"
_DIGIT = "Which digit is in the center of the image?"
_BREED = "Which breed is the cat or dog in this image?"
_RETINA = "How severe is the diabetic retinopathy in this image of a retina?"
_CHARTS = _free("query|question", "label|answer")

IMAGE14: tuple[Task, ...] = (
    _class("camelyon", _CAMELYON, _TISSUE, "normal, tumor", "tumor in patches of lymph nodes"),
    _class("svhn", _SVHN, _DIGIT, "0,1,2,3,4,5,6,7,8,9", "house numbers, digit by digit"),
    _class("pets", _PET_SET, _BREED, _PETS, "37 breeds"),
    _class("flowers102", _FLOWER_SET, "Which flower is in this image?", _FLOWERS, "102 flowers"),
    _class("eurosat", _EUROSAT_SET, "What does this satellite image show?", _EUROSAT, "land use from above"),
    _class("caltech101", _CALTECH_SET, "What is in this image?", _CALTECH, "101 kinds of objects"),
    _ask("chartqa", _CHARTQA, _CHARTS, "questions about charts", "relaxed_accuracy"),
    _ask("okvqa", _OKVQA, _voted(), "questions that need outside knowledge", "vqa_accuracy"),
    _ask("scienceqa", _SCIENCEQA, (_scienceqa, "question choices answer"), "school science with a picture"),
    _ask("seed_bench", _SEED_BENCH, (_seed_bench, _SEED), "what is where in pictures"),
    _ask("text_recognition", _WORDS, _free("", "text|label", _WORD), "a cropped word to be read", "exact_match"),
    _ask("textvqa", _TEXTVQA, _voted(), "questions about text in pictures", "vqa_accuracy"),
    _ask("vizwiz_vqa", _VIZWIZ, _voted(_BLIND), "photos and questions of blind people", "vqa_accuracy"),
    _ask("vqa_rad", _VQA_RAD, _free("question", "answer"), "radiology questions", "exact_match"),
)
IMAGE_TASKS: tuple[Task, ...] = (
    *IMAGE14,
    _class("retinopathy", _hub("CDHAI/EyePACS"), _RETINA, _RETINOPATHY, "severity of diabetic retinopathy"),
    _class("kitti_distance", _CARS, "How far away is the closest vehicle?", _KITTI, "distance to the closest vehicle"),
)
