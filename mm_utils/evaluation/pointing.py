"""What a model makes of regions: where in an image it finds what a phrase says, and which phrase it gives to a box.

Pointing (the pointing game, arXiv 1608.00507): it points at the cell of the image's grid whose embedding has the highest
cosine with the phrase's, and is right if the cell's centre lies in the phrase's box. Pointing blindly is right as often as
boxes cover of the image, which is given beside it as chance.

Choice: the box's own phrase has the highest cosine with the box among the different phrases of its image.

Ties, and scores that are no number, count against the model.

Shape letters: R regions of a batch, N of the split, h x w cells, E embedding width.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle
from torch import Tensor
from tqdm.auto import tqdm

from mm_utils import ranks
from mm_utils.data.augment import center_square
from mm_utils.data.images import open_image
from mm_utils.data.regions import Regions, regions_of
from mm_utils.data.tokens import caption_key
from mm_utils.intervals import mean_interval
from mm_utils.metrics import Evaluate
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.reporting import GREEN, INK, ORANGE, draw_text, missing_glyphs_allowed, new_figure, wrap

TILES, COLUMNS, SIDE = 18, 6, 160  # of the picture: phrases, phrases a row, pixels


@dataclass
class Pointed:
    """A phrase of an image, and where the model looked for it.

    Attributes:
        row: the image's place in the data set.
        key: of the phrase, see `mm_utils.data.regions`.
        box: left, top, right, bottom in shares of the centre square.
        is_hit: whether the highest cell lies in the box.
        heat: `[h, w]` cosines of the cells with the phrase.
    """

    row: int
    key: int
    box: list[float]
    is_hit: bool
    heat: Tensor


class PointingEvaluator:
    """How often the model points into the box, and knows its phrase; all ranks get the same figures, however many.

    Attributes:
        examples: some phrases of the last evaluation, on each rank its own.
    """

    def __init__(self) -> None:
        self.examples: list[Pointed] = []

    @torch.no_grad()
    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Look at the regions of what `loader` yields; see `region_figures`."""
        self.examples, device = [], accelerator.device
        found = [torch.empty(0, 4, dtype=torch.long, device=device)]
        areas = [torch.empty(0, dtype=torch.double, device=device)]
        progress = tqdm(loader, desc="Pointing", leave=False, disable=not accelerator.is_main_process, delay=2)
        for batch in progress:
            if not len(batch["rows"]):
                continue
            regions, count = regions_of(batch)
            with accelerator.autocast():
                _, taps = model.vision_features(batch["pixel_values"], with_taps=True)
                cells_bhwE = model.cell_embeds(taps).float()
                box_RE = model.region_embeds(taps, regions.boxes, regions.image).float()
                phrase_RE = model.encode_text(regions.input_ids, regions.attention_mask)[0].float()
            heat_Rhw = torch.einsum("re,rhwe->rhw", phrase_RE, cells_bhwE[regions.image])
            is_hit_R, row_R = hits(heat_Rhw, regions.boxes), batch["rows"][regions.image]
            columns = (row_R, is_hit_R, *chosen(box_RE @ phrase_RE.T, regions))
            found.append(torch.stack([column.long() for column in columns], 1)[:count])
            areas.append((regions.boxes[:, 2:] - regions.boxes[:, :2]).prod(1).double()[:count])
            shown = slice(min(count, TILES - len(self.examples)))
            lists = [column[shown].tolist() for column in (row_R, regions.keys, regions.boxes, is_hit_R)]
            self.examples += map(Pointed, *lists, heat_Rhw[shown].cpu())
        sizes = ranks.gather_sizes(sum(map(len, found)), device)
        return region_figures(ranks.gather(torch.cat(found), sizes), ranks.gather(torch.cat(areas), sizes))


def region_figures(found_N4: Tensor, area_N: Tensor) -> dict[str, float]:
    """`pointing_accuracy` with its 95 % interval over images, `_low` to `_high`, and `pointing_chance`; and where images
    have several phrases, `region_choice` and `region_choice_chance`. Nothing, if there is no region.

    Args:
        found_N4: image, whether it was hit, whether it was chosen, number of phrases it was chosen among.
        area_N: of the boxes.
    """
    if not len(found_N4):
        return {}
    row_N, is_hit_N, is_chosen_N, phrases_N = found_N4.unbind(1)
    accuracy, half = mean_interval(is_hit_N, row_N)
    figures = {
        "pointing_accuracy": accuracy,
        "pointing_accuracy_low": max(0.0, accuracy - half),
        "pointing_accuracy_high": min(1.0, accuracy + half),
        "pointing_chance": area_N.mean().item(),
    }
    several = phrases_N > 1
    if several.any():
        figures["region_choice"] = is_chosen_N[several].double().mean().item()
        figures["region_choice_chance"] = (1 / phrases_N[several].double()).mean().item()
    return figures


def chosen(cosine_RR: Tensor, regions: Regions) -> tuple[Tensor, Tensor]:
    """Whether each box (a row) is nearest to its own phrase among those of its image, bool `[R]`; and their number."""
    is_rival_RR = (regions.image[:, None] == regions.image) & (regions.keys[:, None] != regions.keys)
    is_wrong_RR = ~(cosine_RR < cosine_RR.diagonal()[:, None]) & is_rival_RR
    return ~is_wrong_RR.any(1), 1 + is_rival_RR.sum(1)


def hits(heat_Rhw: Tensor, boxes: Tensor) -> Tensor:
    """Whether the highest cell's centre is in the box, bool `[R]`. A box between all centres cannot be hit."""
    height, width = heat_Rhw.shape[1:]
    down, across = ((torch.arange(size, device=boxes.device) + 0.5) / size for size in (height, width))
    in_rows = (boxes[:, 1, None] <= down) & (down <= boxes[:, 3, None])
    in_columns = (boxes[:, 0, None] <= across) & (across <= boxes[:, 2, None])
    inside_Rn = (in_rows[:, :, None] & in_columns[:, None]).flatten(1)
    heat_Rn = heat_Rhw.flatten(1)
    best, rival = (heat_Rn.masked_fill(~mask, -torch.inf).amax(1) for mask in (inside_Rn, ~inside_Rn))
    return best > rival


def with_pointing(evaluate: Evaluate, pointing: PointingEvaluator | None) -> Evaluate:
    """An evaluator that measures pointing too, on a loader of regions; without `pointing`, `evaluate` as it is."""
    if pointing is None:
        return evaluate

    def measure(model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        return evaluate(model, loader, accelerator) | pointing(model, loader, accelerator)

    return measure


def report_pointing(
    accelerator: Accelerator, pointing: PointingEvaluator | None, rows: datasets.Dataset, folder: str
) -> None:
    """On the main process, draw examples of the last evaluation, whose `rows` these were, as `regions.png`."""
    if accelerator.is_main_process and pointing is not None and pointing.examples:
        draw_pointing(pointing.examples, rows, Path(folder, "regions.png"))


def draw_pointing(examples: list[Pointed], rows: datasets.Dataset, out_path: Path) -> None:
    """Draw some phrases of `rows` a tile each: the image, its box, how the model sees the phrase in it, where it points.

    Boxes and titles are green where it points into the box.
    """
    if not examples:
        raise ValueError("examples is empty; there is nothing to draw. Evaluate images that have regions.")
    columns = min(COLUMNS, len(examples))
    lines = -(-len(examples) // columns)
    figure = new_figure(1.7 * columns, 1.9 * lines)
    for number, example in enumerate(examples):
        _draw_tile(figure.add_subplot(lines, columns, number + 1), example, rows[example.row])
    with missing_glyphs_allowed():
        FigureCanvasAgg(figure).print_png(str(out_path))


def _draw_tile(ax: Axes, example: Pointed, row: dict) -> None:
    phrases = {caption_key(region["phrase"]): region["phrase"] for region in row["regions"]}
    square = center_square(open_image(row["image"]), SIDE).permute(1, 2, 0).numpy()
    heat = (example.heat - example.heat.min()) / (example.heat.max() - example.heat.min()).clamp(min=1e-6)
    extent = (0, 1, 1, 0)
    ax.imshow(np.asarray(square), extent=extent)
    ax.imshow(heat.numpy(), cmap="magma", extent=extent, alpha=0.45, interpolation="bilinear", vmin=0, vmax=1)
    left, top, right, bottom = example.box
    color = GREEN if example.is_hit else ORANGE
    ax.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=color, linewidth=2))
    height, width = heat.shape
    down, across = divmod(int(heat.argmax()), width)
    ax.plot((across + 0.5) / width, (down + 0.5) / height, "o", color="white", markeredgecolor=INK, markersize=6)
    ax.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    draw_text(ax, 0, -0.03, wrap(phrases[example.key], 30, 2), va="bottom", fontsize=6.5, color=color)
