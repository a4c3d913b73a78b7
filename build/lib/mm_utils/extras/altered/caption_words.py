"""English words that alter a caption: attributes, spatial words, words around a noun.

Words that mean about the same stand together, between bars: none replaces another.
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ATTRIBUTES = {
    "colour": "red crimson scarlet | orange | yellow | green | blue navy | purple violet | pink magenta | brown tan beige | "
    "black | white | grey gray",
    "size": "small little tiny miniature | large big huge giant enormous",
    "height": "tall high | short low",
    "width": "wide broad thick | narrow thin slim",
    "age": "young | old elderly",
    "number": "two | three | four | five | six | seven | eight | nine | ten",
    "material": "wooden wood | metal metallic steel iron aluminum aluminium | plastic | glass | stone marble granite | brick | "
    "concrete cement | leather | paper cardboard | rubber | ceramic porcelain clay | gold golden | silver",
    "pattern": "striped | dotted spotted | plain solid | checkered checked plaid | floral",
    "shape": "round circular | square | rectangular | triangular",
    "state": "open | closed shut",
    "moisture": "wet | dry",
    "content": "empty | full",
}
SPATIAL = (
    ("left of", "right of"),
    ("to the left", "to the right"),
    ("on the left", "on the right"),
    ("to its left", "to its right"),
    ("left side", "right side"),
    ("left hand", "right hand"),
    ("above", "below"),
    ("over", "under"),
    ("on top of", "underneath"),
    ("in front of", "behind"),
    ("inside", "outside"),
    ("indoors", "outdoors"),
    ("at the top", "at the bottom"),
    ("on the top", "on the bottom"),
    ("in the foreground", "in the background"),
    ("upper", "lower"),
)
DETERMINERS = _words("a an the his her its their my your our another each every")
# What may follow a noun. A word of "ing" may, too.
CLOSERS = _words(
    "and or but with without of in on at to from by for near is are was were has have that which who while as than into "
    "onto over under above below behind beside besides beneath underneath between among amid through across against along "
    "around next left right up down off out inside outside toward towards during before after upon atop under be being "
    "can may will seen made used"
)
# Words between two nouns that make swapping them another statement: a dog on a chair is not a chair on a dog.
ASYMMETRIC = _words(
    "on in under above below behind inside outside over beneath underneath into onto atop through across against from left "
    "right riding holding carrying eating wearing pulling pushing chasing watching covering leading"
)
# No names of things, or of places in the picture and not of what it shows.
NO_NOUNS = (
    DETERMINERS
    | CLOSERS
    | ASYMMETRIC
    | _words(
        "he she it they him them there here other others same few many several much more most lot lots both all any left right "
        "top bottom side sides middle center centre front back foreground background edge corner end part parts half rest photo "
        "photos photograph picture pictures image images figure figures view views scene kind type variety series set pair "
        "group number ones thirds upper lower close clear following very quite first second third last not also only just then "
        "so such when where what how"
    )
)
NOUNS_TOO = _words("square glass brick stone paper wood marble")
"""Attributes that are nouns where no other noun follows."""
PLURALS = _words("people men women children feet teeth mice geese cattle police sheep")
"""Plurals without an s at the end."""
