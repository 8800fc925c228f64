"""The words and sentence frames of the built-in tasks: one set for training, one for testing, nothing in common."""

from __future__ import annotations

from types import SimpleNamespace

Material = SimpleNamespace  # what one split is made of


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _forms(text: str, ending: str) -> tuple[tuple[str, str], ...]:
    """Words in two forms: "key box/boxes" -> (("key", "keys"), ("box", "boxes")), where the ending is "s"."""
    pairs = (word.split("/") if "/" in word else (word, word + ending) for word in text.split())
    return tuple((first, second) for first, second in pairs)


TRAIN = Material(
    praise=_words(
        "wonderful excellent charming delightful superb lovely brilliant pleasant impressive beautiful fantastic "
        "enjoyable splendid perfect graceful inspiring"
    ),
    blame=_words(
        "terrible awful dreadful boring ugly horrible clumsy annoying disappointing nasty dull unpleasant "
        "miserable poor shabby tedious"
    ),
    reviewed=_words(
        "soup hotel concert novel garden lecture bakery museum painting jacket ferry puzzle song kitchen tour play"
    ),
    opinions=(
        "The {noun} was {adjective}.",
        "I thought the {noun} was {adjective}.",
        "What a {adjective} {noun} that was!",
        "Everyone called the {noun} {adjective}.",
    ),
    nouns=_forms(
        "key door letter lamp chair pencil bottle ticket window basket mirror button carpet ladder wagon candle "
        "box/boxes brush/brushes dish/dishes shelf/shelves knife/knives story/stories",
        "s",
    ),
    states=_words("old red clean heavy wooden small empty broken cheap round wet new green dusty"),
    agreements=(
        "The {subject} near the {near} ___ {adjective}. Which word fits?",
        "The {subject} behind the {near} ___ {adjective}. Which word fits?",
        "The {subject} beside the {near} ___ very {adjective}. Which word fits?",
    ),
    animals=_words(
        "horse rabbit eagle salmon spider goat lion frog duck wolf whale bee mouse camel otter crow dog kitten "
        "monkey snake owl pig squirrel deer crab hamster swan buffalo lizard bear"
    ),
    foods=_words(
        "bread cheese apple rice carrot soup butter pancake onion honey lemon noodle potato cake bean plum "
        "mushroom cookie salad cucumber peach spinach chocolate waffle mango jam porridge pear steak cereal"
    ),
    tools=_words(
        "hammer saw drill shovel wrench pliers axe chisel rake screwdriver crowbar clamp anvil trowel spanner "
        "sandpaper nail scissors ladder ruler welder broom tape-measure paintbrush pitchfork bolt lathe "
        "wheelbarrow screw hatchet"
    ),
    places=(
        "Where would you look for {word}?",
        "Where does {word} belong?",
        "Someone mentions {word}. Where is it?",
        "Choose the right place for {word}.",
        "We talk about {word}. Name the building.",
    ),
    all_of=("Every {one} is {adjective}.", "All of the {many} are {adjective}.", "Each {one} is {adjective}."),
    none_of=("No {one} is {adjective}.", "None of the {many} are {adjective}.", "Not one {one} is {adjective}."),
    members=("Is this {one} {adjective}?", "Is the first {one} {adjective}?"),
    names=_words("Anna Boris Clara David Elena Frank Greta Hugo Irene Jonas Karin Leo Mona Nils Olga Peter"),
    verbs=_forms("paint clean open close/closed push move/moved carry/carried order repair borrow watch count", "ed"),
    will=("will", "is going to"),
    events=(
        "{name} {verb} the {noun}.",
        "In the morning {name} {verb} the {noun}.",
        "With some help {name} {verb} the {noun}.",
        "Quietly {name} {verb} the {noun}.",
    ),
)

TEST = Material(
    praise=_words("marvellous outstanding amazing great magnificent elegant remarkable terrific gorgeous stunning"),
    blame=_words("dismal atrocious lousy hideous appalling dreary disgusting pathetic mediocre ghastly"),
    reviewed=_words("film meal camera beach festival sofa bicycle theatre library sandwich speech cottage"),
    opinions=("My sister found the {noun} {adjective}.", "To be honest, this {noun} seemed {adjective}."),
    nouns=_forms(
        "clock table coin kettle pillow guitar bucket sweater marble ribbon bench/benches glass/glasses leaf/leaves",
        "s",
    ),
    states=_words("blue dirty light tiny expensive warm yellow sharp soft strange"),
    agreements=(
        "The {subject} above the {near} ___ {adjective}. Which word fits?",
        "The {subject} next to the {near} ___ quite {adjective}. Which word fits?",
    ),
    animals=_words(
        "tiger sheep penguin shark beetle zebra parrot donkey turtle fox cow elephant hawk ant giraffe seal "
        "leopard chicken octopus badger"
    ),
    foods=_words(
        "banana pasta yogurt tomato sausage biscuit cabbage omelette grape pizza strawberry muffin garlic pumpkin "
        "bacon cherry toast lettuce spaghetti hamburger"
    ),
    tools=_words(
        "mallet tweezers hacksaw hoe sickle sander pickaxe toolbox soldering-iron spade sledgehammer handsaw tongs "
        "plunger toolkit machete stapler jackhammer grinder blowtorch"
    ),
    places=(
        "You want to see {word}. Which way do you go?",
        "What is the usual home of {word}?",
        "They are searching for {word}. What should they visit?",
    ),
    all_of=("Without exception the {many} are {adjective}.", "Any {one} at all is {adjective}."),
    none_of=("There is no {one} that is {adjective}.", "The {many} are never {adjective}."),
    members=("Would the next {one} be {adjective}?", "Is that {one} {adjective}?"),
    names=_words("Quentin Rosa Simon Tilda Ulrich Vera Walter Xenia Yusuf Zoe Marta Oscar"),
    verbs=_forms("wash pull sell/sold lift polish hide/hid drop/dropped inspect", "ed"),
    will=("will",),
    events=("After lunch {name} {verb} a {noun}.", "At home {name} {verb} another {noun}."),
)
