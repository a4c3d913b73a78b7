"""The embedded clips: two or three coloured things, to which things happen in turn.

A clip has 16 frames of 64 pixels, 8 a second. In half of the contents the things appear for their event alone (ids begin
with `appear`); in the others they stand there all the time (`stay`), so that nothing but the motion tells when it happens,
and no single frame which event it will be. The 2,000 default clips take 12 s on one core and 34 MB on disk. Pixels follow
from the seed everywhere, JPEG bytes from it and Pillow's codec.
"""

import io
import random
from functools import partial

import numpy as np
from PIL import Image

from mm_utils.data.media.riff import write_avi
from mm_utils.data.scenes import COLOURS as SCENE_COLOURS
from mm_utils.data.scenes import shape_mask
from mm_utils.data.sets.generate import Content, Event, Medium, Recipe, Span, lay_out

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {name: SCENE_COLOURS[name] for name in ("red", "green", "blue", "yellow", "white", "black")}
MOVES = {"moves left": (-1, 0), "moves right": (1, 0), "moves up": (0, -1), "moves down": (0, 1)}
SCALES = {"grows": 1.6, "shrinks": 0.45}
ACTIONS = (*MOVES, *SCALES, "blinks")
FRAMES, FPS, SIZE = 16, 8, 64

_LENGTHS = {2: (5, 6), 3: (4, 4)}  # frames of an event, by the number of events
_WAY = 10.0  # pixels that a thing moves
_HALF = 7.5  # half its extent, in pixels
_OVERSAMPLING = 4

_State = tuple[float, float, float]  # centre and half the extent


def draw_frames(content: Content, rng: random.Random) -> tuple[np.ndarray, list[Span]]:
    """Return a clip's frames, uint8 `[16, 64, 64, 3]`, and each event's span in seconds.

    A thing changes from frame to frame within the span of its event and at no other time.
    """
    count = len(content.events)
    lengths = [rng.choices(_LENGTHS[count])[0] for _ in content.events]
    within = lay_out(lengths, FRAMES, 0 if count == 3 else 1, rng)
    quarters = sorted(((x, y) for x in (18.0, 46.0) for y in (18.0, 46.0)), key=lambda _: rng.random())
    ground = rng.uniform(145, 175) + np.array([rng.uniform(-7, 7) for _ in range(3)])
    frames = np.broadcast_to(ground, (FRAMES, SIZE, SIZE, 3)).copy()
    for (colour, shape, action), (begin, end), (x, y) in zip(content.events, within, quarters, strict=False):
        start = (x + rng.uniform(-2, 2), y + rng.uniform(-2, 2), _HALF * rng.uniform(0.96, 1.04))
        paint = np.clip([channel + rng.uniform(-8, 8) for channel in COLOURS[colour]], 0, 255)
        covers: dict[_State, tuple[tuple[slice, slice], np.ndarray]] = {}
        for at in range(FRAMES):
            state = _state(action, start, min(1.0, max(0.0, (at + 1 - begin) / (end - begin))))
            hidden = action == "blinks" and begin < at < end - 1
            if hidden or (content.style == "appear" and not begin <= at < end):
                continue
            if state not in covers:
                covers[state] = _cover(shape, state)
            place, share = covers[state]
            frames[at][place] += share * (paint - frames[at][place])
    return np.floor(frames + 0.5).astype(np.uint8), [(begin / FPS, end / FPS) for begin, end in within]


def _draw_events(rng: random.Random, count: int) -> tuple[Event, ...]:
    colours = sorted(COLOURS, key=lambda _: rng.random())[:count]
    shapes, actions = rng.choices(SHAPES, k=count), rng.choices(ACTIONS, k=count)
    return tuple(zip(colours, shapes, actions, strict=True))


def _phrase(event: Event) -> str:
    return " ".join(["a", *event])


def _render(content: Content, rng: random.Random) -> Medium:
    frames, spans = draw_frames(content, rng)
    files = [b"" if at and np.array_equal(frame, frames[at - 1]) else _jpeg(frame) for at, frame in enumerate(frames)]
    return Medium(write_avi(files, FPS, (SIZE, SIZE)), spans, FRAMES / FPS, SIZE, SIZE)


def _jpeg(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, format="JPEG", quality=95, subsampling=0)
    return file.getvalue()


def _state(action: str, start: _State, done: float) -> _State:
    """Return where a thing is, and how large, when so much of its event is over."""
    x, y, half = start
    aside, down = MOVES.get(action, (0, 0))
    return x + aside * _WAY * done, y + down * _WAY * done, half * (1 + (SCALES.get(action, 1) - 1) * done)


def _cover(shape: str, state: _State) -> tuple[tuple[slice, slice], np.ndarray]:
    """Return the frame's part about a thing, and its pixels' covered share `[rows, cols, 1]`."""
    x, y, half = state
    columns, rows = (slice(max(0, int(c - half) - 1), min(SIZE, int(c + half) + 2)) for c in (x, y))
    across, down = (
        (np.arange(part.start * _OVERSAMPLING, part.stop * _OVERSAMPLING) + 0.5) / _OVERSAMPLING
        for part in (columns, rows)
    )
    mask = shape_mask(shape, (across[None, :] - x) / half, (down[:, None] - y) / half)
    blocks = mask.reshape(rows.stop - rows.start, _OVERSAMPLING, columns.stop - columns.start, _OVERSAMPLING)
    return (rows, columns), blocks.mean(axis=(1, 3))[..., None]


CLIPS = Recipe("clips", "clip", "1", ("appear", "stay"), _draw_events, _phrase, _render)
load_clips = partial(CLIPS.load, num_train=1500, num_eval=250)
