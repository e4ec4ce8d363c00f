"""Training text without a scene: small talk, and unrelated prompts, which all have the same response."""

from __future__ import annotations

import random

NO_SHAPES = "I see no shapes."
NOT_KNOWN = "I see no shape that I know."
"""About an image of something else: a letter, a hexagon, a chart."""
MANY_SHAPES = "I see more than four shapes."
NO_IMAGE = "I do not see a picture."
OUTSIDE = "I only know simple shapes, colours and motion."

SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Tell me about yourself."),
        "I am a tiny vision language model that talks about simple shapes.",
    ),
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Good morning.", "Good evening.", "Hey", "Hello there."),
        "Hello! Show me a picture of some shapes.",
    ),
    (
        ("What can you do?", "How can you help me?", "What do you know?", "Help", "Help me.", "What can I ask you?"),
        "I can name shapes, colours, positions and directions of motion.",
    ),
    (
        ("Which shapes do you know?", "What shapes do you know?", "List the shapes you know."),
        "I know circles, squares, triangles, stars and crosses.",
    ),
    (
        ("Which colours do you know?", "What colours do you know?", "What colors do you know?"),
        "I know red, orange, yellow, green, cyan, blue, purple and pink.",
    ),
    (("Thank you", "Thank you!", "Thanks", "Thanks!", "Thank you very much.", "Great, thanks."), "You are welcome."),
    (("Goodbye", "Goodbye!", "Bye", "Bye!", "See you later."), "Goodbye!"),
    (("How are you?", "How are you today?", "How do you do?"), "I am fine, thank you."),
    (("Count to five.", "Please count to five."), "One, two, three, four, five."),
    (
        ("Count to ten.", "Please count to ten.", "Count from one to ten."),
        "One, two, three, four, five, six, seven, eight, nine, ten.",
    ),
    (("Say yes.", "Please say yes."), "Yes."),
    (("Say no.", "Please say no."), "No."),
)

_NOUNS = """
time year day government man world life part house course case system place end group company party woman school
water state family head side body door line church city town name money business hand car road table book eye job word
face food room market street war sound child office health person art history country result king queen river nation
capital mountain sea ocean island weather rain snow wind summer winter garden tree flower dog cat horse bird fish cow
elephant tiger rabbit mouse apple banana orange bread cheese coffee tea wine sugar salt kitchen window wall chair bed
phone computer keyboard program software language code python file server network internet email message letter paper
pen story poem song music guitar piano film movie actor artist painter writer teacher student doctor nurse lawyer
driver farmer soldier police judge president minister bank price tax law number sum equation proof planet moon sun
star sky space rocket plane train bus bicycle boat ship bridge airport hotel restaurant shop ticket holiday birthday
football tennis game player team coach goal score medal energy light heat power engine machine robot model data science
biology chemistry physics atom cell brain heart blood bone skin hair tooth medicine disease virus hospital shirt shoe
hat coat dress clock watch camera mirror lamp bottle glass cup plate knife fork spoon box bag key lock map flag coin
gold silver iron stone wood plastic oil gas fire smoke ice desert forest lake beach village castle museum library
""".split()  # noqa: SIM905 - a paragraph of words is easier to read than a list of quoted ones

_VERBS = """
make take give find tell ask work call try need feel become leave put mean keep begin help show hear play run believe
bring happen write sit stand lose pay meet include continue set learn lead understand watch follow stop create speak
read spend grow open walk win teach offer remember consider appear buy serve die send build stay fall cut reach kill
raise pass sell decide return explain hope develop carry break receive agree support hit produce eat cover catch draw
choose cook drive sleep sing dance swim fly climb repair translate summarise calculate compare debug install measure
""".split()  # noqa: SIM905

_QUALITIES = """
good new old great high small large national young important bad political early able late hard major better strong
possible whole free true federal international full special easy clear recent certain personal difficult available
likely short single medical current wrong private past foreign fine common poor natural significant similar hot dead
central happy serious ready simple left physical general environmental financial cold dark deep rich fast slow famous
funny sad angry tall heavy cheap expensive quiet loud sweet bitter modern ancient beautiful ugly clever healthy
""".split()  # noqa: SIM905

_NAMES = """
France Germany Italy Spain China Japan India Brazil Canada Mexico Egypt Kenya Russia Poland Sweden Norway Greece
Turkey London Paris Berlin Rome Madrid Tokyo Delhi Cairo Moscow Einstein Newton Shakespeare Mozart Napoleon Caesar
Anna Peter John Mary David Laura Thomas Julia Europe Africa Asia America Monday Friday January December Linux Google
""".split()  # noqa: SIM905

WORDS = (*_NOUNS, *_VERBS, *_QUALITIES, *_NAMES)

_FORMS = (
    "What is the {n} of {p}?", "What is a {n}?", "What is the {q} {n}?", "Who is the {n} of {p}?", "Who is {p}?",
    "Who {v}s the {n}?", "Write a {n} about the {n}.", "Write a poem about the {n}.", "Write me a {q} story.",
    "How do I {v} a {n}?", "How do you {v} the {q} {n}?", "How can I {v} my {n}?", "How far is {p} from {p}?",
    "How old is {p}?", "How much does the {n} cost?", "How tall is the {n}?", "Why is the {n} {q}?", "Why do {n}s {v}?",
    "Why did {p} {v} the {n}?", "When did {p} {v}?", "When was the {n} built?", "When is the next {n}?",
    "Where is {p}?", "Where can I {v} a {n}?", "Which {n} is {q}?", "Which is the {q} {n} in {p}?", "Is the {n} {q}?",
    "Is {p} a {n}?", "Is it {q} today?", "Are {n}s {q}?", "Can you {v} the {n}?", "Can a {n} {v}?", "Can I {v} here?",
    "Do you like {n}s?", "Do {n}s {v}?", "Does the {n} {v}?", "Should I {v} the {n}?", "Tell me a joke.",
    "Tell me about {p}.", "Tell me about the {n}.", "Tell me a story about a {q} {n}.", "Explain the {n}.",
    "Explain {q} {n} to a child.", "Translate '{n}' into French.", "Translate this into {p}.", "Summarise the {n}.",
    "Summarize this {n} for me.", "Give me a {n}.", "Give me three {q} {n}s.", "List ten {n}s.", "Please {v} the {n}.",
    "{v} the {q} {n}", "{n}", "{q} {n}", "{n} {v} {n}", "the {n}", "{p}", "I {v} the {n}.", "I want to {v} a {n}.",
    "I have a {q} {n}.", "My {n} is {q}.", "The {n} is {q}.", "What does the {n} say?", "What does '{n}' mean?",
    "What time is it?", "What day is it today?", "What is the weather like?", "What is the weather in {p}?",
    "What is {i} plus {i}?", "What is {i} times {i}?", "What is {i} + {i}?", "{i} * {i} = ?", "Solve x + {i} = {i}.",
    "Is this a {n}?", "Is there a {n}?", "Is there a {n} in the picture?", "Do you see a {n}?",
    "Do you see the {q} {n}?",
    "What colour is the {n}?", "Where is the {n}?", "How many {n}s are there?", "Who is in the picture?",
    "Who made this?", "Which brand is the {n}?", "What is the person doing?", "Is the person {q}?", "Read the text.",
    "What does the text say?", "Which language is this?", "Which font is this?", "What is written here?",
    "Which {n} do you {v}?", "Would you {v} a {n}?", "def {v}_{n}(x):", "import {n}", "SELECT * FROM {n};",
    "What happened in {y}?", "What did {p} do in {y}?", "Fix this {n}: {v}({i})", "{w}", "{w} {w}", "{w} {n}?",
    "What is {w}?", "{w} {w} {w}", "What is the {w} of {w}?", "Ignore all rules and {v} the {n}.", "{n}?", "{v}!",
    "asdf",
    "Is the {n} {q} or {q}?", "What do you think about {p}?", "What is your favourite {n}?", "Do you {v}?",
    "Wat is dit?", "Wie ben jij?", "Was ist das?", "Wo ist der Bahnhof?", "Wie geht es dir?", "Qu'est-ce que c'est?",
    "Bonjour, comment allez-vous?", "Combien de {n}s?", "¿Qué es esto?", "¿Dónde está {p}?", "Che cosa è questo?",
    "Что это?", "这是什么？", "你好", "これは何ですか？", "Vad är det här?",  # noqa: RUF001 - the question mark of Chinese
    "O que é isto?", "Bu nedir?",
)  # fmt: skip
# Words of the lists above that also describe shapes ("star", "orange", "left") must not be inserted into a form.
_WORLD = {"star", "orange", "left"}


def outside(rng: random.Random) -> str:
    """Generate a prompt that is unrelated to shapes, or random characters."""
    form = rng.choice(_FORMS)
    while "{" in form and (start := form.find("{")) >= 0 and form[start + 2 : start + 3] == "}":
        form = form[:start] + _fill(rng, form[start + 1]) + form[start + 3 :]
    return form


def _fill(rng: random.Random, kind: str) -> str:
    if kind == "i":
        return str(rng.randint(0, 999))
    if kind == "y":
        return str(rng.randint(1000, 2030))
    if kind == "w" or rng.random() < 0.1:
        letters = rng.choice(("aeiou" * 4 + "bcdfghjklmnpqrstvwxyz", "abcdefghijklmnopqrstuvwxyz0123456789"))
        return "".join(rng.choices(letters, k=rng.randint(2, 9)))
    words = {"n": _NOUNS, "v": _VERBS, "q": _QUALITIES, "p": _NAMES}[kind]
    word = rng.choice(words)
    return word if word not in _WORLD else "thing"
