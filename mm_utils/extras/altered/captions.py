"""Make true captions false by a few words: attributes, objects, places, order of events.

The kinds are those of SugarCrepe (arXiv 2306.14610) and ARO (arXiv 2210.01936), by rules instead of a language model:

    swap_attributes    a red ball and a blue cube  >  a blue ball and a red cube
    swap_nouns         a dog on a chair            >  a chair on a dog
    replace_attribute  a red ball                  >  a green ball
    replace_noun       a red ball                  >  a red house
    replace_spatial    a ball above a cube         >  a ball below a cube
    event_order        a dog barks, then it rains  >  it rains, then a dog barks

Nothing tags the words. A noun is a word behind an article, a number or a known attribute, in front of a punctuation mark, a
known preposition or a word like it (`mm_utils.extras.altered.caption_words`); capitalised words are names and stay. This leaves out
most nouns and takes few words that are none. What replaces a word comes from the captions of the split: an attribute of the
same list, a noun of the same number, each as often as it occurs there, and none that another caption of the image has.

An altered caption may by chance be true, and it may read oddly; so a model that reads the caption alone is not right for
exactly half of them. What that gains is measured, too: see `mm_utils.evaluation.probes`. Captions in another language
than English have no probes. `AlteredTokens` alters the captions of a training batch.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, pairwise
from typing import NamedTuple

import datasets
from transformers import PreTrainedTokenizerBase

from mm_utils.evaluation.probes import Probe
from mm_utils.extras.altered.caption_words import (
    ASYMMETRIC,
    ATTRIBUTES,
    CLOSERS,
    DETERMINERS,
    NO_NOUNS,
    NOUNS_TOO,
    PLURALS,
    SPATIAL,
)

MOST_IMAGES = 5_000  # whose captions are read
MOST_CHARACTERS = 4_000  # of a caption; time grows with their square, and longer ones are left out
MOST_PROBES = 1_000  # of a kind: the interval is then at most 3 points to each side
_TOKEN = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")
_SENSES = {
    word: (name, number)
    for name, words in ATTRIBUTES.items()
    for number, sense in enumerate(words.split("|"))
    for word in sense.split()
}
_NO_NOUNS = NO_NOUNS | (_SENSES.keys() - NOUNS_TOO)
_OPPOSITES = {word: other for pair in SPATIAL for word, other in (pair, pair[::-1])}
_EVENTS = re.compile(r"(first,? )?([^.:;!?]+?)(( after that)?[.!]?)", re.IGNORECASE)  # one sentence
_THEN = re.compile(
    r",? and then,? |, (?:then|after that|afterwards),? | (?:then|after that) (?=(?:an?|the|some|someone|another) )"
    r"|,? (?:and |(?:is|are) )?followed by ",
    re.IGNORECASE,
)
_NOT_THEN = re.compile(r"\b(?:now and|since|by|back|even|until|if .*) then\b", re.IGNORECASE)
_AND = re.compile(",? and ")
_PLACE = re.compile(rf"\b(?:{'|'.join(sorted(_OPPOSITES, key=len, reverse=True))})\b")


class Group(NamedTuple):
    """A noun with its attributes, as indices of tokens."""

    noun: int
    attributes: dict[str, int]  # by the name of their list


@dataclass
class Caption:
    """A caption as tokens, those of a first word in lower case."""

    text: str
    found: list[re.Match[str]] = field(init=False)
    tokens: list[str] = field(init=False)
    groups: list[Group] = field(init=False)

    def __post_init__(self) -> None:
        self.found = list(_TOKEN.finditer(self.text))
        self.tokens = [match[0] for match in self.found]
        if self.tokens and self.tokens[0].istitle():
            self.tokens[0] = self.tokens[0].lower()
        self.groups = list(self._find_groups())

    def _find_groups(self) -> Iterator[Group]:
        for place, word in enumerate(self.tokens):
            may_be = word.isalpha() and word.islower() and len(word) > 2 and word not in _NO_NOUNS
            if not may_be or not self._ends(place + 1):
                continue
            attributes, before = {}, place - 1
            while before >= 0 and (sense := _SENSES.get(self.tokens[before])):
                attributes[sense[0]] = before
                before -= 1
            if attributes or (before >= 0 and self.tokens[before].lower() in DETERMINERS):
                yield Group(place, attributes)

    def _ends(self, place: int) -> bool:
        """Return whether a noun may end in front of this token."""
        word = self.tokens[place] if place < len(self.tokens) else "."
        return not word[0].isalnum() or word in CLOSERS or (len(word) > 4 and word.endswith("ing"))

    def with_words(self, changes: dict[int, str]) -> str:
        """Return the text with other words at places; a and an, and a capital, follow."""
        parts, end = [], 0
        for place, match in enumerate(self.found):
            word, following = changes.get(place, match[0]), changes.get(place + 1)
            if following and match[0].lower() in ("a", "an") and _vowel(following) != _vowel(self.tokens[place + 1]):
                word = "an" if _vowel(following) else "a"
            if match[0][0].isupper() and not word[0].isupper():
                word = word[0].upper() + word[1:]
            parts += [self.text[end : match.start()], word]
            end = match.end()
        return "".join([*parts, self.text[end:]])


class Vocabulary:
    """How often each list's attributes, and nouns in both numbers, occur in some captions."""

    def __init__(self, captions: Iterable[Caption]):
        self.attributes: dict[str, Counter[str]] = defaultdict(Counter)
        self.nouns: dict[bool, Counter[str]] = defaultdict(Counter)
        for caption in captions:
            for group in caption.groups:
                for name, place in group.attributes.items():
                    self.attributes[name][caption.tokens[place]] += 1
                noun = caption.tokens[group.noun]
                self.nouns[_is_plural(noun)][noun] += 1


class Drawing(NamedTuple):
    """What an alteration may draw from."""

    random: random.Random
    vocabulary: Vocabulary
    others: frozenset[str]  # words of the image's captions, which replace none


# -- the kinds of alterations; each returns None where the caption has nothing to alter ------------------------------------


def swap_attributes(caption: Caption, drawing: Drawing) -> str | None:
    """Swap two attributes of one list that belong to different nouns."""
    tokens = caption.tokens
    pairs = [(one.attributes[name], other.attributes[name]) for one, other, name in _contrasts(caption)]
    if not pairs:
        return None
    one, other = drawing.random.choice(pairs)
    return caption.with_words({one: tokens[other], other: tokens[one]})


def swap_nouns(caption: Caption, drawing: Drawing) -> str | None:
    """Swap two nouns of one number whose attributes differ, or which an asymmetric word joins."""
    tokens = caption.tokens
    pairs = {(one.noun, other.noun) for one, other, _ in _contrasts(caption)}
    for one, other in pairwise(caption.groups):
        between = tokens[one.noun + 1 : other.noun]
        if not ASYMMETRIC.isdisjoint(between) and {"and", "or", ",", ".", ";", ":"}.isdisjoint(between):
            pairs.add((one.noun, other.noun))
    of_one_number = sorted(
        (one, other)
        for one, other in pairs
        if tokens[one] != tokens[other] and _is_plural(tokens[one]) == _is_plural(tokens[other])
    )
    if not of_one_number:
        return None
    first, second = drawing.random.choice(of_one_number)
    return caption.with_words({first: tokens[second], second: tokens[first]})


def replace_attribute(caption: Caption, drawing: Drawing) -> str | None:
    """Replace an attribute of a noun by another one of its list."""
    places = [(name, place) for group in caption.groups for name, place in group.attributes.items()]
    if not places:
        return None
    name, place = drawing.random.choice(places)
    sense = _SENSES[caption.tokens[place]]
    word = _draw(drawing, drawing.vocabulary.attributes[name], lambda word: _SENSES[word] != sense)
    return caption.with_words({place: word}) if word else None


def replace_noun(caption: Caption, drawing: Drawing) -> str | None:
    """Replace a noun by another one of the same number."""
    if not caption.groups:
        return None
    place = drawing.random.choice(caption.groups).noun
    stems = {word.removesuffix("s") for word in drawing.others}
    known = drawing.vocabulary.nouns[_is_plural(caption.tokens[place])]
    word = _draw(drawing, known, lambda word: word.removesuffix("s") not in stems)
    return caption.with_words({place: word}) if word else None


def replace_spatial(caption: Caption, drawing: Drawing) -> str | None:
    """Replace a spatial word by its opposite."""
    found = list(_PLACE.finditer(caption.text))
    if not found:
        return None
    match = drawing.random.choice(found)
    return caption.text[: match.start()] + _OPPOSITES[match[0]] + caption.text[match.end() :]


def event_order(caption: Caption, drawing: Drawing) -> str | None:
    """Exchange the first and last event that a sentence tells: then, after that, followed by.

    "Before" is none of these words: in captions of images it mostly says where something is.
    """
    whole = _EVENTS.fullmatch(caption.text)
    if whole is None or _NOT_THEN.search(caption.text):
        return None
    first, text, end, is_suffix = whole.groups(default="")
    joint, most = (_AND, 1) if is_suffix else (_THEN, 0)  # a dog barks, and it rains after that
    events, joints = joint.split(text, most), joint.findall(text)
    if len(events) < 2 or not all(events) or events[0].lower() == events[-1].lower():
        return None
    if text[0].isupper() and not first:
        events[0] = events[0][0].lower() + events[0][1:]
        events[-1] = events[-1][0].upper() + events[-1][1:]
    events[0], events[-1] = events[-1], events[0]
    return first + "".join(map("".join, zip(events, [*joints[: len(events) - 1], end], strict=True)))


Alter = Callable[[Caption, Drawing], str | None]
KINDS: dict[str, Alter] = {
    each.__name__: each
    for each in (swap_attributes, swap_nouns, replace_attribute, replace_noun, replace_spatial, event_order)
}
TRAINED = (swap_attributes, swap_nouns, replace_spatial, event_order)  # all that need no other captions


def _contrasts(caption: Caption) -> Iterator[tuple[Group, Group, str]]:
    """Yield two groups with different nouns, and a list of which their attributes differ."""
    tokens = caption.tokens
    for one, other in combinations(caption.groups, 2):
        for name, place in one.attributes.items():
            same = name in other.attributes and _SENSES[tokens[place]] == _SENSES[tokens[other.attributes[name]]]
            if name in other.attributes and not same and tokens[one.noun] != tokens[other.noun]:
                yield one, other, name


def _draw(drawing: Drawing, counts: Counter[str], may: Callable[[str], bool]) -> str | None:
    words = [word for word in counts if word not in drawing.others and may(word)]
    return drawing.random.choices(words, [counts[word] for word in words])[0] if words else None


def _is_plural(noun: str) -> bool:
    return noun in PLURALS or (noun.endswith("s") and not noun.endswith(("ss", "us", "is")))


def _vowel(word: str) -> bool:
    return word[0] in "aeiou"


# -- of a split -----------------------------------------------------------------------------------------------------------


def altered_captions(rows: datasets.Dataset, kinds: Mapping[str, Alter] = KINDS) -> list[Probe]:
    """Return an image's probes, at most one a kind: of the first caption that can be altered.

    Of more than `MOST_IMAGES` rows, and of more than `MOST_PROBES` probes of a kind, that many are taken, evenly spread. The
    result follows from the rows alone.
    """
    wanted = _spread(range(len(rows)), MOST_IMAGES)
    columns = [name for name in ("captions", "languages") if name in rows.column_names]
    read = {
        row: _english(values) for row, values in zip(wanted, rows.select_columns(columns).select(wanted), strict=True)
    }
    vocabulary = Vocabulary(caption for captions in read.values() for caption, _ in captions)
    found: dict[str, list[Probe]] = {kind: [] for kind in kinds}
    for row, captions in read.items():
        others = frozenset(token for caption, _ in captions for token in caption.tokens)
        texts = {caption.text for caption, _ in captions}
        for kind, alter in kinds.items():
            for caption, language in captions:
                false = alter(caption, Drawing(random.Random(f"{kind} {caption.text}"), vocabulary, others))
                if false is not None and false not in texts:
                    found[kind].append(Probe(kind, row, caption.text, false, language))
                    break
    return [probe for probes in found.values() for probe in _spread(probes, MOST_PROBES)]


def event_probes(rows: datasets.Dataset) -> list[Probe]:
    """Return the probes of the order of events."""
    return altered_captions(rows, {"event_order": event_order})


def _english(row: dict[str, list[str]]) -> list[tuple[Caption, str]]:
    """Return a row's captions in English, or in no language that is given, with the latter."""
    languages = row.get("languages") or [""] * len(row["captions"])
    pairs = zip(row["captions"], (language or "" for language in languages), strict=True)
    return [
        (Caption(text), language)
        for text, language in pairs
        if re.split("[-_]", language.lower())[0] in ("en", "eng", "") and len(text) <= MOST_CHARACTERS
    ]


def _spread(values: Sequence, most: int) -> Sequence:
    """Return at most `most` values, evenly spread."""
    return values if len(values) <= most else [values[len(values) * place // most] for place in range(most)]


# -- of a batch -----------------------------------------------------------------------------------------------------------


class AlteredTokens:
    """The altered captions of one that is given as tokens, at most one by each of `TRAINED`.

    They follow from the tokens alone, and are remembered. One of more tokens than the caption is left out, so that no longest
    length is exceeded. A caption that is not made of the same tokens again, such as one with unknown letters or of a language
    that the tokenizer marks, has none; nor has a very long one.

    Args:
        tokenizer: the tokenizer of the captions.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.of = lru_cache(maxsize=2**16)(self._alter)

    def _alter(self, ids: tuple[int, ...]) -> list[list[int]]:
        text = str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
        if len(text) > MOST_CHARACTERS:
            return []
        caption, nothing = Caption(text), (Vocabulary([]), frozenset[str]())
        found = dict.fromkeys(alter(caption, Drawing(random.Random(text), *nothing)) for alter in TRAINED)
        whole, *altered = self.tokenizer([text, *filter(None, found)])["input_ids"]
        return [each for each in altered if len(each) <= len(ids) and each != whole] if tuple(whole) == ids else []
