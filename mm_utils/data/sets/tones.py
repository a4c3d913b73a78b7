"""The embedded sounds: tones, chords, clicks and noises in turn, in faint noise.

A sound lasts 4 s at 16 kHz. Tones rise, fall, waver or stay, low, middle or high, and last short or long; clicks are
counted. The 1,600 default sounds take 5 s on one core and 205 MB on disk. Samples follow from the seed, but for the last bit
of a very few where another library computes the sine.
"""

import random
from functools import partial

import numpy as np

from mm_utils.data.media.riff import write_wav
from mm_utils.data.sets.generate import Content, Event, Medium, Recipe, Span, lay_out

RATE, SECONDS = 16000, 4
PITCHES = {"low": (220.0, 320.0), "middle": (700.0, 1000.0), "high": (2200.0, 3000.0)}  # Hz
COURSES = ("rising", "falling", "steady", "wavering")
LENGTHS = {"short": (0.25, 0.4), "long": (0.8, 1.1)}  # seconds
COUNTS = {"two clicks": 2, "three clicks": 3, "four clicks": 4}
NOISES = ("hiss", "rumble")

_FAMILIES = ("tone", "tone", "tone", "chord", "clicks", "noise")
_GLIDE = 2.0  # ratio of the highest to the lowest frequency of a tone that rises or falls
_GAP = 0.12  # least silence about an event, in seconds
_FADE = 0.01


def make_samples(content: Content, rng: random.Random) -> tuple[np.ndarray, list[Span]]:
    """Return the samples of a sound, int16 `[64000]`, and the span of each event in seconds."""
    parts = [_event(event, rng) * rng.uniform(0.3, 0.6) for event in content.events]
    within = lay_out([len(part) for part in parts], SECONDS * RATE, round(_GAP * RATE), rng)
    samples = 0.002 * _white(SECONDS * RATE, rng)
    for part, (begin, end) in zip(parts, within, strict=True):
        samples[begin:end] += part
    return np.floor(samples * 32767 + 0.5).astype(np.int16), [(begin / RATE, end / RATE) for begin, end in within]


def _draw_events(rng: random.Random, count: int) -> tuple[Event, ...]:
    events: list[Event] = []
    while len(events) < count:
        family, (length,) = rng.choices(_FAMILIES)[0], rng.choices(list(LENGTHS))
        event: Event = (rng.choices(list(COUNTS))[0],)
        if family == "tone":
            event = (length, rng.choices(list(PITCHES))[0], rng.choices(COURSES)[0], "tone")
        elif family == "chord":
            event = (length, rng.choices(("low", "high"))[0], "chord")
        elif family == "noise":
            event = (length, rng.choices(NOISES)[0])
        if event not in events:
            events.append(event)
    return tuple(events)


def _phrase(event: Event) -> str:
    return " ".join(event if event[0] in COUNTS else ["a", *event])


def _render(content: Content, rng: random.Random) -> Medium:
    samples, spans = make_samples(content, rng)
    return Medium(write_wav(samples, RATE), spans, float(SECONDS))


def _event(event: Event, rng: random.Random) -> np.ndarray:
    """Return the samples of an event, about within [-1, 1]."""
    if event[0] in COUNTS:
        return _clicks(COUNTS[event[0]], rng)
    samples = round(rng.uniform(*LENGTHS[event[0]]) * RATE)
    time = np.arange(samples) / RATE
    if event[-1] == "chord":
        base = rng.uniform(*PITCHES[event[1]])
        sound = sum(np.sin(2 * np.pi * base * ratio * time) for ratio in (1.0, 1.25, 1.5)) / 2
    elif event[-1] == "tone":
        sound = _tone(event[2], rng.uniform(*PITCHES[event[1]]), time)
    else:
        sound = _noise(event[-1], samples, rng)
    fade = np.minimum(time, time[::-1]) / _FADE
    return np.asarray(sound * np.minimum(fade, 1.0))


def _tone(course: str, frequency: float, time: np.ndarray) -> np.ndarray:
    """Return a sine whose frequency runs through `frequency` in the middle of its way."""
    if course == "steady":
        return np.sin(2 * np.pi * frequency * time)
    if course == "wavering":
        return np.sin(2 * np.pi * frequency * (time - 0.25 / (2 * np.pi * 8) * np.cos(2 * np.pi * 8 * time)))
    ratio = _GLIDE if course == "rising" else 1 / _GLIDE
    pace = np.log(ratio) / time[-1]
    return np.sin(2 * np.pi * frequency / ratio**0.5 * (np.exp(pace * time) - 1) / pace)


def _noise(kind: str, samples: int, rng: random.Random) -> np.ndarray:
    white = _white(samples + 32, rng)
    if kind == "hiss":
        return np.diff(white, 2)[:samples] / 3
    sums = np.cumsum(white)
    return (sums[32:] - sums[:-32]) / 8


def _clicks(count: int, rng: random.Random) -> np.ndarray:
    gap = round(rng.uniform(0.13, 0.18) * RATE)
    time = np.arange(round(0.02 * RATE)) / RATE
    click = np.exp(-time / 0.003) * np.sin(2 * np.pi * 1200 * time)
    sound = np.zeros(gap * (count - 1) + len(click))
    for place in range(count):
        sound[place * gap : place * gap + len(click)] += 1.5 * click
    return sound


def _white(samples: int, rng: random.Random) -> np.ndarray:
    """Return white noise in [-1, 1)."""
    return np.frombuffer(rng.randbytes(2 * samples), "<i2") / 32768


SOUNDS = Recipe("sounds", "sound", "1", ("sound",), _draw_events, _phrase, _render)
load_sounds = partial(SOUNDS.load, num_train=1200, num_eval=200)
