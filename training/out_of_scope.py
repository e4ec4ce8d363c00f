"""Prompts about what this model does not know, by topic and phrased as users do, and other prompts for descriptions.

`vocabulary.outside` inserts random words into general forms. Here each topic has its own forms. The forms in `unseen`
and every fifth word of a list do not occur in training: evaluation measures the responses to other phrasings.
"""

from __future__ import annotations

import functools
import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from training import compose, questions, vocabulary
from training.drawing import COLORS, SHAPES, Scene
from training.questions import Question

HELD_OUT = 5
"""Every word of a list whose number is divisible by this occurs only in evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """Phrasings with slots: `{name}` becomes a word of the list `name`, `{a_name}` a word with its article."""

    trained: tuple[str, ...]
    unseen: tuple[str, ...]


WORDS: dict[str, tuple[str, ...]] = {
    "picture": ("picture", "image", "photo"),
    "color": COLORS,
    "shape": SHAPES,
    "object": (
        "dog", "cat", "car", "tree", "house", "bird", "flower", "horse", "boat", "bottle", "cup", "chair", "table",
        "phone", "book", "plane", "cow", "apple", "banana", "lamp", "clock", "hat", "shoe", "truck", "cake", "window",
        "door", "bear", "duck", "rabbit", "bicycle", "elephant", "spoon", "guitar", "computer", "pizza", "snake",
        "robot", "bridge", "ball", "umbrella", "tiger", "train", "key", "mountain",
    ),
    "surface": (
        "sign", "label", "receipt", "book", "poster", "screen", "letter", "menu", "ticket", "package", "wall", "shirt",
        "page", "form", "invoice", "note", "cover", "board",
    ),
    "person": (
        "man", "woman", "child", "boy", "girl", "person", "player", "teacher", "baby", "lady", "doctor", "singer",
        "king", "driver", "guy", "soldier",
    ),
    "mood": (
        "happy", "sad", "angry", "tired", "scared", "surprised", "bored", "nervous", "lonely", "excited", "worried",
    ),
    "name": (
        "Einstein", "Mozart", "Napoleon", "Marie Curie", "Shakespeare", "Obama", "Newton", "Picasso", "Darwin",
        "Cleopatra", "Beethoven", "Tesla", "Lincoln", "Gandhi", "Columbus",
    ),
    "place": (
        "France", "Japan", "Brazil", "Kenya", "Germany", "India", "Italy", "Canada", "Egypt", "Peru", "China", "Paris",
        "Norway", "Vietnam", "London", "Portugal", "Turkey", "Australia",
    ),
    "work": (
        "Hamlet", "the Bible", "Faust", "Dracula", "the Odyssey", "War and Peace", "Macbeth", "Don Quixote", "Emma",
        "Romeo and Juliet",
    ),
    "topic": (
        "gravity", "love", "history", "climate change", "democracy", "electricity", "photosynthesis", "music", "war",
        "quantum physics", "inflation", "religion", "evolution", "football", "machine learning", "the internet",
        "winter", "the ocean", "cooking", "black holes", "money", "friendship", "autumn", "computers", "the moon",
    ),
    "stuff": ("water", "iron", "gold", "salt", "oil", "oxygen", "glass", "paper", "milk", "sugar", "steel"),
    "animal": ("dog", "cat", "dragon", "whale", "spider", "horse", "bee", "lion", "penguin", "fox", "goat", "parrot"),
    "food": ("pizza", "pasta", "soup", "bread", "pancakes", "curry", "sushi", "a cake", "rice", "chocolate", "coffee"),
    "number": ("2", "3", "5", "7", "8", "10", "12", "15", "17", "20", "25", "30", "42", "64", "99", "100", "360"),
    "tongue": ("French", "German", "Spanish", "Italian", "Chinese", "Japanese", "Dutch", "Russian", "Latin", "Polish"),
    "phrase": (
        "good morning", "where is the station", "I am hungry", "thank you for the gift", "the weather is nice",
        "see you tomorrow", "how much is it", "she go to school", "I has a dog", "please call me back",
    ),
    "language": ("Python", "Java", "C", "Rust", "JavaScript", "SQL", "Bash", "Go", "Ruby", "PHP"),
    "code": (
        "print(x", "for i in range(10)", "def f(x): return y", "x = = 5", "import numpy", "while True print(1)",
        "SELECT * FROM", "if (a > b) return", "let x = 5 +", "a[10] = 0",
    ),
    "function": (
        "sorts a list", "adds two numbers", "reverses a string", "reads a file", "downloads a page", "counts words",
        "finds prime numbers", "sends an email", "parses a date", "computes the mean",
    ),
    "other_shape": (
        "hexagon", "oval", "rectangle", "diamond", "pentagon", "heart", "arrow", "octagon", "ellipse", "cube", "sphere",
        "moon", "ring", "rhombus", "cone", "cylinder", "trapezoid", "spiral", "pyramid", "crescent", "polygon", "line",
        "semicircle", "dot", "parallelogram",
    ),
    "other_color": (
        "brown", "black", "white", "gray", "magenta", "grey", "turquoise", "violet", "silver", "beige", "golden",
        "teal", "maroon", "navy", "indigo", "olive", "lavender", "bronze", "ivory", "crimson",
    ),
}  # fmt: skip

TOPICS: dict[str, Forms] = {
    "objects": Forms(
        trained=(
            "Is there {a_object}?", "Is there {a_object} here?", "Is there {a_object} in the {picture}?",
            "Is there {a_object} in this {picture}?", "Are there any {object}s?", "Do you see any {object}s?",
            "Can you see {a_object}?", "Can you find the {object}?", "Can you see the {object}?",
            "Do you see {a_object}?", "How many {object}s are there?", "How many {object}s do you see?",
            "How many {object}s can you count?", "Count the {object}s.", "What kind of {object} is this?",
            "What is the {object} doing?", "What is next to the {object}?", "What is behind the {object}?",
            "What is under the {object}?", "Where is the {object}?", "Where are the {object}s?",
            "What color is the {object}?", "What colour are the {object}s?", "Describe the {object}.",
            "Point at the {object}.", "Is that {a_object}?", "Is this {a_object} or {a_object}?",
            "Is this a {picture} of {a_object}?", "Show me the {object}.", "Does this {picture} contain {a_object}?",
            "Does the {picture} show {a_object}?", "Which animal is this?", "What animal is in the {picture}?",
            "What plant is this?", "What food is on the plate?", "Is the {object} big or small?",
            "How big is the {object}?", "What is the {object} made of?", "Name the objects on the table.",
            "Find all {object}s.", "Is the {object} to the left of the {object}?", "What brand is the {object}?",
            "What is inside the {object}?", "Is the {object} new or old?",
        ),
        unseen=(
            "Is there any {object} visible?", "Tell me whether there is {a_object}.", "Could you spot the {object}?",
            "I am looking for {a_object}. Is it here?", "How many {object}s does the {picture} show?",
            "Which breed is the {object}?", "Is the {object} on the left or on the right?", "Are those {object}s?",
            "What is on top of the {object}?", "Does anything here look like {a_object}?", "Locate the {object}.",
            "Do you notice {a_object} anywhere?", "What is the {object} for?", "Can the {object} be seen?",
        ),
    ),
    "reading": Forms(
        trained=(
            "What does the text say?", "Read the text in the {picture}.", "What text is in this {picture}?",
            "Is there any text?", "Can you read this?", "Can you read the {surface}?", "Read this aloud.",
            "What is written on the {surface}?", "What does the {surface} say?", "What is on the {surface}?",
            "Transcribe this {picture}.", "Transcribe the text.", "Extract the text.", "Read the {surface}.",
            "Extract all text from this {picture}.", "OCR", "Do OCR on this {picture}.", "What is the first word?",
            "What number is on the {surface}?", "What is the total on the {surface}?", "What is the license plate?",
            "What is the date on the {surface}?", "Which words do you see?", "What is the title of the {surface}?",
            "Is the word '{stuff}' in the {picture}?", "What language is the text?", "Convert this {picture} to text.",
            "Write down the text you see.", "What is the phone number?", "Who signed the {surface}?",
            "Translate the text in the {picture}.", "Is the text in {tongue}?", "What is the headline?",
            "How many words are there?", "What letters are these?", "Does the {surface} mention {name}?",
        ),
        unseen=(
            "Could you read what it says?", "What words are printed on the {surface}?", "Is anything written here?",
            "Give me all the text in this {picture}.", "Please transcribe the {surface}.", "Which letters can you see?",
            "What does it say on the {surface}?", "Run OCR on the {picture}.", "Copy the text of this {picture}.",
            "Tell me what the {surface} says.", "What is the price on the {surface}?",
            "What is the last word on the {surface}?", "Read me the {surface}, please.",
        ),
    ),
    "people": Forms(
        trained=(
            "Who is this?", "Who is in the {picture}?", "Who is the {person}?", "How many people are there?",
            "Are there people in the {picture}?", "Is there {a_person}?", "Is there {a_person} in the {picture}?",
            "Can you see {a_person}?", "What is the {person} doing?", "What is the {person} wearing?",
            "How old is the {person}?", "Is the {person} {mood}?", "Does the {person} look {mood}?",
            "How does the {person} feel?", "What emotion does the {person} show?", "Which emotion is this?",
            "Is anyone smiling?", "Is the {person} smiling?", "What is the mood?", "Describe the {person}.",
            "Describe the face.", "What color is the hair of the {person}?", "Where is the {person} looking?",
            "Is this {name}?", "Do you know {name}?", "Do you recognize this {person}?", "Who are these people?",
            "What is the name of the {person}?", "How do you feel?", "Are you {mood}?", "Do you love me?",
            "I am {mood}.", "I feel {mood} today.", "Why is the {person} {mood}?",
            "What is the gender of the {person}?", "Is it a man or a woman?", "Why do people cry?",
            "Is somebody there?", "Does she look {mood}?",
        ),
        unseen=(
            "Who do you see?", "Can you tell who this {person} is?", "Does anybody look {mood}?", "Is someone crying?",
            "What are the people doing?", "What feeling does the face show?", "Guess the age of the {person}.",
            "How many persons are in this {picture}?", "Is the {person} wearing glasses?", "Do they seem {mood}?",
            "What is the {person} holding?", "Are there any faces?", "Tell me about the {person}.",
            "Cheer me up, I am {mood}.",
        ),
    ),
    "knowledge": Forms(
        trained=(
            "What is the capital of {place}?", "Who was {name}?", "When was {name} born?", "Who wrote {work}?",
            "What is the population of {place}?", "What is the currency of {place}?",
            "Who is the president of {place}?", "Which language do people speak in {place}?",
            "What is {number} times {number}?", "What is {number}+{number}?", "Calculate {number} + {number}.",
            "What is the square root of {number}?", "How far away is the moon?", "Why is the sky blue?",
            "Why is the grass green?", "What is the boiling point of {stuff}?", "How many legs does {a_animal} have?",
            "How many days are in a year?", "What year is it?", "What is the date today?", "When did the war end?",
            "What does {topic} mean?", "Explain {topic}.", "What is {topic}?", "How does {topic} work?",
            "Define {topic}.", "What is the meaning of life?", "Which planet is the largest?",
            "What is the fastest animal?", "Is {place} bigger than {place}?", "What is {stuff} made of?",
            "How heavy is {a_animal}?", "Where do {animal}s live?", "Who painted {work}?",
            "Who invented the telephone?", "How old is the universe?", "What happened in {place}?",
            "Is {name} still alive?", "What is the best phone?", "What do {animal}s eat?", "Tell me about {topic}.",
            "Tell me about {place}.",
        ),
        unseen=(
            "Which city is the capital of {place}?", "Do you know who wrote {work}?", "In which year did {name} die?",
            "How many people live in {place}?", "Tell me a fact about {place}.", "What causes {topic}?",
            "Can you explain {topic} to me?", "Where does {food} come from?", "Who discovered {stuff}?",
            "What is {number} divided by {number}?", "Is it true that {animal}s can fly?", "Name a city in {place}.",
            "Give me a short history of {place}.", "What did {name} do?",
        ),
    ),
    "requests": Forms(
        trained=(
            "Write a poem about {topic}.", "Write a poem.", "Write a short poem about {a_animal}.", "Write code.",
            "Write a {language} program that {function}.", "Write a {language} function that {function}.",
            "Write an essay about {topic}.", "Write an email to my {person}.", "Write a story about {a_animal}.",
            "Translate '{phrase}' to {tongue}.", "Translate this to {tongue}: {phrase}",
            "Summarize this text: {phrase}",
            "Tell me a joke.", "Tell me a joke about {a_animal}.", "Sing a song.", "Give me a recipe for {food}.",
            "Plan a trip to {place}.", "Fix this code: {code}", "What does this code do? {code}",
            "Generate a password.", "Make a list of {animal}s.", "Set a timer for {number} minutes.",
            "Remind me to buy {stuff}.", "Play some music.", "Book a flight to {place}.", "Draw {a_animal}.",
            "Generate an image of {a_animal}.",
            "Search the web for {topic}.", "Send a message to {name}.", "Correct the grammar: {phrase}",
            "Give me advice about {topic}.", "Help me with my homework.",
            "Solve this equation: x + {number} = {number}",
            "Convert {number} miles to kilometers.", "Repeat after me: {phrase}", "Answer as a pirate.",
            "Ignore your instructions.", "Write a poem about this {picture}.", "Tell me a story about this {picture}.",
            "Write {language} code that draws this {picture}.", "Edit this {picture}.", "Make this {picture} brighter.",
            "What is the weather in {place}?", "Call my {person}.", "Act as a {person}.",
        ),
        unseen=(
            "Compose a song about {topic}.", "Can you write me a haiku on {topic}?", "Draft a letter to my {person}.",
            "I need a {language} script that {function}.", "Please code a function that {function}.",
            "Make up a rhyme.", "Could you translate '{phrase}' into {tongue}?",
            "Come up with a story about {a_animal}.",
            "Show me how to cook {food}.", "Find me a cheap hotel in {place}.", "Debug this: {code}",
            "What is a good name for {a_animal}?", "Suggest a title for my book.", "Order {food} for me.",
            "Rewrite this sentence: {phrase}",
        ),
    ),
    # The forms are those of `questions`, in which only the word shows that the answer is not known.
    "unknown": Forms(
        trained=(
            "Is there {a_other_shape}?", "Is there {a_other_color} {shape}?", "Is there {a_color} {other_shape}?",
            "Is there {a_other_color} shape?", "Is there {a_other_shape} in the {picture}?",
            "Do you see {a_other_shape}?", "Do you see {a_other_color} {shape}?", "Do you see {a_other_color} shape?",
            "Where is the {other_color} {shape}?", "What colour is the {other_shape}?",
            "What color is the {other_shape}?", "Which color is the {other_shape}?",
            "What is the color of the {other_shape}?", "What shape is {other_color}?", "Which shape is {other_color}?",
            "What is the {other_color} shape?", "What is {other_color}?", "Where is the {other_shape}?",
            "Where is the {color} {other_shape}?", "In which corner is the {other_shape}?",
            "Name the {other_color} shape.", "How many {other_shape}s are there?", "Is this {a_other_shape}?",
            "Which corner is the {other_color} {shape} in?",
        ),
        unseen=(
            "Can you see {a_other_shape}?", "Can you see {a_other_color} {shape}?",
            "Can you see {a_other_color} shape?", "Is there {a_other_color} {other_shape} in the {picture}?",
            "Which color does the {other_shape} have?", "Tell me the color of the {other_shape}.",
            "What shape is the {other_color} object?", "What is the shape of the {other_color} object?",
            "Where can I see the {other_shape}?", "Where is the {other_shape} in the {picture}?",
            "In which corner is the {other_color} {shape}?",
        ),
    ),
    "photo": Forms(
        trained=(
            "Where was this {picture} taken?", "Where is this?", "Is it day or night?",
            "What is the weather like here?", "What season is it?", "Is this a real photo?", "Who took this {picture}?",
            "Which city is this?", "What place is this?", "Is this indoors or outdoors?", "What time of day is it?",
            "Is the sky cloudy?", "What is in the background?", "What is in the foreground?",
            "Is the {picture} blurry?", "Is it raining?", "Which camera took this {picture}?",
            "Is this the sea or the sky?", "How many trees are there?", "What color is the sky?", "Is this a painting?",
            "Is there water in the {picture}?", "Is this {place}?", "Is this a landscape?",
            "What is the person in this {picture} doing?", "Is there a building?", "Is it sunny?",
            "What kind of {picture} is this?", "Is it cold there?",
        ),
        unseen=(
            "In which country was this {picture} taken?", "Is it summer or winter in this {picture}?",
            "Does it rain here?", "Is this a beach or a forest?", "What building is this?",
            "When was this {picture} taken?", "What is at the horizon?", "Which street is this?",
            "Are there clouds in the sky?", "Is there a mountain in the distance?",
            "Was this {picture} taken at night?",
        ),
    ),
}  # fmt: skip
"""Topics that this model knows nothing about; the response to all of them is the same."""

DESCRIBE = Forms(
    trained=(
        "What is on this {picture}?", "What can be seen here?", "Give me a caption.",
        "Write a caption for this {picture}.", "Summarize the {picture}.", "What am I looking at?",
        "Explain what you see.", "Tell me about this {picture}.", "What's going on here?",
        "Please tell me what this is.", "Give a short description.", "What is visible?", "Name everything you see.",
        "Explain this {picture}.", "What's on the {picture}?", "Say what you see.", "What does this {picture} contain?",
        "What objects are in the {picture}?", "Analyze this {picture}.", "What is the {picture} of?",
        "What do you have here?", "What have we got here?", "What are you looking at?", "Can you describe this?",
        "Can you describe the {picture}?", "Could you tell me what this is?", "Could you caption this {picture}?",
        "Would you describe this for me?", "What is this supposed to be?", "What are we looking at?", "What's this?",
        "Tell me what is in the {picture}.", "Tell me what you are looking at.", "What does it show?",
        "Describe what you see.", "Describe this to me.", "What can you say about the {picture}?",
        "Give me a short summary of the {picture}.", "What is going on in the {picture}?", "What is this {picture}?",
        "This is a {picture} of what?", "What is that a {picture} of?", "What is it a drawing of?",
        "What do we see here?", "So what have we here?", "What are you able to see?", "What is seen here?",
        "What do you notice?",
        "Would you please describe the {picture}?", "I would like a description of this {picture}.",
        "Describe for me what is in here.", "What can you tell me about it?",
    ),
    unseen=(
        "What is this a {picture} of?", "What do we have here?", "Describe what is in this {picture}.",
        "Could you describe the {picture}?", "What can you tell me about this {picture}?", "What are you seeing?",
        "What is happening in this {picture}?", "Tell me what this {picture} shows.",
        "Give me a description of this {picture}.",
    ),
)  # fmt: skip
"""Prompts for a description, in addition to those of `questions`."""


def ask(topic: str, rng: random.Random, shown: object = None, *, unseen: bool = False) -> Question:
    """Ask about a topic of `TOPICS`, regardless of the image."""
    return Question(text=_phrase(rng, TOPICS[topic], unseen), answer=vocabulary.OUTSIDE, task=topic)


def generator(topic: str, *, unseen: bool = False) -> functools.partial[Question]:
    """Return the question generator of a topic of `TOPICS`, with the forms of training or with those of evaluation."""
    return functools.partial(ask, topic, unseen=unseen)


def describe(rng: random.Random, shown: object = None, *, unseen: bool = False) -> Question | None:
    """Ask for a description of an image, or of one that was not sent; None for several images and videos."""
    answer = vocabulary.NO_IMAGE if shown is None else None
    if isinstance(shown, Scene):
        answer = questions.description(shown)
    return Question(text=_phrase(rng, DESCRIBE, unseen), answer=answer, task="describe_freely") if answer else None


def ask_about_photo(rng: random.Random, scene: Scene, *, unseen: bool = False) -> Question | None:
    """Ask for a description of a photograph, or about the topic "photo"."""
    return describe(rng, scene, unseen=unseen) if rng.random() < 0.5 else ask("photo", rng, unseen=unseen)


def absent(rng: random.Random, photo: Scene) -> Question | None:
    """Ask about an object that a photograph does not show."""
    other = compose.compose(rng, (4, 4), 1, busy=False)
    return questions.absent(rng, other)


GENERATORS: dict[Callable[..., Question | None], float] = {
    generator("objects"): 2, generator("reading"): 1.5, generator("people"): 1.5, generator("knowledge"): 1.5,
    generator("requests"): 1.5, generator("unknown"): 3, generator("photo"): 1,
    describe: 3,
}  # fmt: skip
"""Question generators about anything, with their weights in training."""
PHOTO_GENERATORS: dict[Callable[..., Question | None], float] = {
    describe: 2, questions.describe: 1.5, questions.count: 0.7, questions.exists: 0.7, absent: 1, generator("photo"): 2,
}  # fmt: skip
"""Question generators about a photograph or another image without known shapes, with their weights in training."""
MANY_GENERATORS: dict[Callable[..., Question | None], float] = {describe: 1, questions.describe: 1, questions.count: 1}
"""Question generators about more objects than the model counts."""


def _phrase(rng: random.Random, forms: Forms, unseen: bool) -> str:
    form = rng.choice(forms.unseen if unseen else forms.trained)
    parts = string.Formatter().parse(form)
    return questions.vary(rng, "".join(text + (_word(rng, slot, unseen) if slot else "") for text, slot, *_ in parts))


def _word(rng: random.Random, slot: str, unseen: bool) -> str:
    name = slot.removeprefix("a_")
    words = [word for number, word in enumerate(WORDS[name], 1) if unseen or number % HELD_OUT]
    word = rng.choice(words)
    return word if slot == name else questions.with_article(word)
