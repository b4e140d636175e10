r"""Skills of the built-in model, their exact answers, and the inputs they are defined on.

The built-in base model repeats its input. Each of its LoRA adapters does one other thing to the text. Each such skill
has a reference function here, so every answer can be checked.

A prompt is ``text + "\n"``; the model's answer is ``skill.apply(text)`` followed by the end token. This module is plain
Python: it needs neither torch nor the trained weights.
"""

import codecs
import itertools
import random
import string
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LETTERS = string.ascii_lowercase
VOWELS = "aeiou"
CONSONANTS = "".join(c for c in LETTERS if c not in VOWELS)
PRINTABLE = "".join(chr(code) for code in range(32, 127))

MIN_SKILL_LENGTH, MAX_SKILL_LENGTH = 3, 16
MAX_REPEAT_LENGTH = 24

HELD_OUT_MODULUS = 50
"""One text in this many is never trained on."""

QV = ("q_proj", "v_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
VO_DOWN = ("v_proj", "o_proj", "down_proj")
KV_GATE_DOWN = ("k_proj", "v_proj", "gate_proj", "down_proj")


@dataclass(frozen=True)
class Skill:
    """One thing that a model does to a text, and the shape of the adapter that does it."""

    name: str
    description: str
    rank: int
    lora_alpha: int
    target_modules: tuple[str, ...]
    apply: Callable[[str], str]
    make_input: Callable[[random.Random], str]

    @property
    def scale(self) -> float:
        """The scale of the adapter's product; 0 for the base, which has no adapter."""
        return self.lora_alpha / self.rank if self.rank else 0.0


# --- reference functions -----------------------------------------------------------------------------------


def _repeat(text: str) -> str:
    return text


def _reverse(text: str) -> str:
    return text[::-1]


def _sort(text: str) -> str:
    return "".join(sorted(text))


def _shift(text: str) -> str:
    letters = LETTERS[1:] + LETTERS[0]
    return text.translate(str.maketrans(LETTERS + LETTERS.upper(), letters + letters.upper()))


def _rot13(text: str) -> str:
    return codecs.encode(text, "rot13")


def _count(text: str) -> str:
    return str(sum(c.isalpha() for c in text))


def _vowels(text: str) -> str:
    return "".join("*" if c.lower() in VOWELS else c for c in text)


def _double(text: str) -> str:
    return "".join(c + c for c in text)


def _title(text: str) -> str:
    return " ".join(word[:1].upper() + word[1:] for word in text.split(" "))


def _initials(text: str) -> str:
    return "".join(word[:1] for word in text.split(" "))


# --- inputs ------------------------------------------------------------------------------------------------


def _random_word(rng: random.Random, length: int, alphabet: Sequence[str] = LETTERS) -> str:
    return "".join(rng.choices(alphabet, k=length))


def _pseudo_word(rng: random.Random, length: int) -> str:
    """A pronounceable word: consonants and vowels by turns."""
    first = rng.randrange(2)
    return "".join(rng.choice(VOWELS if (first + i) % 2 else CONSONANTS) for i in range(length))


def _word(rng: random.Random, length: int) -> str:
    return _pseudo_word(rng, length) if rng.random() < 0.5 else _random_word(rng, length)


def _words(rng: random.Random, length: int, count: int) -> str:
    """`count` words that take `length` characters together, spaces included."""
    letters = length - (count - 1)
    cuts = [0, *sorted(rng.sample(range(1, letters), count - 1)), letters]
    return " ".join(_word(rng, end - start) for start, end in itertools.pairwise(cuts))


def lowercase_input(rng: random.Random, min_words: int = 1, max_length: int = MAX_SKILL_LENGTH) -> str:
    """One to three lowercase words, 3 to 16 characters together: the domain of most skills."""
    length = rng.randint(max(MIN_SKILL_LENGTH, 2 * min_words - 1), max_length)
    return _words(rng, length, rng.randint(min_words, min(3, (length + 1) // 2)))


def single_word_input(rng: random.Random) -> str:
    """One lowercase word of 3 to 12 letters: the domain of `sort`."""
    return _word(rng, rng.randint(MIN_SKILL_LENGTH, 12))


def several_words_input(rng: random.Random) -> str:
    """Two or three lowercase words: the domain of `initials`."""
    return lowercase_input(rng, min_words=2)


def short_input(rng: random.Random) -> str:
    """One to three lowercase words, 3 to 12 characters together: the domain of `double`."""
    return lowercase_input(rng, max_length=12)


def _mixed_case(rng: random.Random, text: str) -> str:
    style = rng.randrange(3)
    if style == 0:
        return _title(text)
    return text.upper() if style == 1 else "".join(rng.choice((c, c.upper())) for c in text)


def repeat_input(rng: random.Random) -> str:
    """One to 24 printable ASCII characters: words, numbers, mixed case, random strings, long runs."""
    length = rng.randint(1, MAX_REPEAT_LENGTH)
    words = _words(rng, length, rng.randint(1, min(4, (length + 1) // 2)))
    kind = rng.random()
    if kind < 0.35:
        return words
    if kind < 0.55:
        return _mixed_case(rng, words)
    if kind < 0.65:
        return _random_word(rng, length, string.digits)
    if kind < 0.75:
        return _random_word(rng, length, rng.sample(PRINTABLE, rng.randint(1, 6)))
    return _random_word(rng, length, string.ascii_letters + string.digits if kind < 0.87 else PRINTABLE)


def wide_input(rng: random.Random) -> str:
    """Up to 16 characters of words that may have capitals, numbers and punctuation.

    No accuracy is promised here; training includes some so that skills do not break on a greeting.
    """
    length = rng.randint(1, MAX_SKILL_LENGTH)
    text = _words(rng, length, rng.randint(1, min(3, (length + 1) // 2)))
    text = _mixed_case(rng, text) if rng.random() < 0.6 else text
    characters = list(text)
    for _ in range(rng.choice((0, 0, 1, 2))):
        characters[rng.randrange(length)] = rng.choice(string.digits + ",.!?-'")
    return "".join(characters)


# --- the table ---------------------------------------------------------------------------------------------

BASE = Skill(
    "repeat",
    "Repeats the text: the base model does this without an adapter.",
    0,
    0,
    (),
    apply=_repeat,
    make_input=repeat_input,
)

SKILLS: dict[str, Skill] = {
    skill.name: skill
    for skill in (
        Skill("upper", "Writes the text in capitals.", 2, 4, QV, apply=str.upper, make_input=lowercase_input),
        Skill("title", "Capitalises each word.", 3, 6, VO_DOWN, apply=_title, make_input=lowercase_input),
        Skill(
            "vowels", "Replaces each vowel by an asterisk.", 4, 4, ATTENTION, apply=_vowels, make_input=lowercase_input
        ),
        Skill("rot13", "Moves each letter 13 places on.", 6, 12, MLP, apply=_rot13, make_input=lowercase_input),
        Skill(
            "shift",
            "Replaces each letter by the next one, z by a.",
            8,
            16,
            ATTENTION + MLP,
            apply=_shift,
            make_input=lowercase_input,
        ),
        Skill(
            "count", "Says how many letters there are.", 8, 16, KV_GATE_DOWN, apply=_count, make_input=lowercase_input
        ),
        Skill(
            "initials",
            "Gives the first letter of each word.",
            12,
            24,
            ATTENTION,
            apply=_initials,
            make_input=several_words_input,
        ),
        Skill("double", "Writes each character twice.", 16, 16, ATTENTION + MLP, apply=_double, make_input=short_input),
        Skill("sort", "Sorts the letters of a word.", 24, 12, VO_DOWN, apply=_sort, make_input=single_word_input),
        Skill("reverse", "Writes the text backwards.", 32, 32, ATTENTION, apply=_reverse, make_input=lowercase_input),
    )
}


def prompt(text: str) -> str:
    """The completion prompt that asks for an answer to `text`."""
    return text + "\n"


def held_out(text: str) -> bool:
    """True if `text` is kept for testing and never used in training."""
    return _bucket(text) == 0


def _bucket(text: str) -> int:
    return zlib.crc32(text.encode()) % HELD_OUT_MODULUS


def sample_inputs(skill: Skill | str, n: int, seed: int, held_out: bool = True) -> list[str]:
    """`n` different inputs of a skill's domain, all held out of training or all allowed in it."""
    chosen = find(skill) if isinstance(skill, str) else skill
    rng = random.Random(f"{chosen.name}:{seed}:{held_out}")
    found: dict[str, None] = {}
    while len(found) < n:
        text = chosen.make_input(rng)
        if (_bucket(text) == 0) == held_out:
            found.setdefault(text)
    return list(found)


def find(name: str) -> Skill:
    """The skill of that name; `repeat` is the base."""
    return BASE if name == BASE.name else SKILLS[name]


def which_skill(text: str, answer: str) -> list[str]:
    """The names of all skills, `repeat` included, that answer `text` with `answer`."""
    return [skill.name for skill in (BASE, *SKILLS.values()) if skill.apply(text) == answer]
