"""Find steps with a loss or gradient that is not finite; end a run that has too many."""

import logging
import math
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch import Tensor

from mm_utils import distributed
from mm_utils.copies import HostCopy
from mm_utils.files import append_rows

logger = logging.getLogger(__name__)


class NonfiniteSteps:
    """The steps of a run that changed nothing because they were not finite.

    Args:
        path: the file that they are written to.
        limit: the run ends with the step of this number.
        has_scaler: True with a loss scaler; an infinite gradient then only means that the scale was too high.

    Attributes:
        count: how many there were, as far as they were read.
    """

    def __init__(self, path: Path, limit: int, has_scaler: bool):
        self.path, self.limit, self.has_scaler, self.count = path, limit, has_scaler, 0
        self._step, self._figures, self._image_ids = 0, torch.zeros(2), [""]
        self._copy: HostCopy | None = None
        self._is_read = True

    def take(self, step: int, loss: Tensor, grad_norm: Tensor, image_ids: list[str]) -> None:
        """Take the figures of a step, counted from 0, to be read with the next `read`."""
        self._figures = torch.stack([loss.float(), grad_norm.float()])
        self._step, self._image_ids, self._copy, self._is_read = step, image_ids, None, False

    def standstill(self) -> Tensor:
        """Return 1 if the step taken last must not change the weights, else 0, on the device."""
        return (self._figures.isfinite().all() & (self._figures[1] != 0)).logical_not().float()

    def send(self) -> None:
        """Begin to copy the figures to the host."""
        if not self._is_read:
            self._copy = HostCopy(self._figures)

    def read(self) -> bool:
        """Return whether the last step may change weights; False if read before. On all ranks.

        A batch without a row has a gradient of 0, and momentum and weight decay would still move the weights. An infinite
        gradient under a loss scaler changes nothing either, but does not count.

        Raises:
            FloatingPointError: if one step too many was not finite.
        """
        if self._is_read:
            return False
        self._is_read = True
        loss, norm = (self._copy or self._figures).tolist()
        if math.isfinite(loss) and (self.has_scaler or math.isfinite(norm)):
            return math.isfinite(norm) and norm != 0
        self.count += 1
        image_ids, step = gather_object(self._image_ids), self._step + 1
        if distributed.rank() == 0:
            figures = {"loss": str(loss), "grad_norm": str(norm)}
            append_rows(self.path, [{"step": step, **figures, "image_ids": image_ids}])
            logger.warning("Step %d was skipped: %s; its images are in %s", step, figures, self.path)
        if self.count >= self.limit:
            raise FloatingPointError(
                f"--set max_nonfinite_steps is {self.limit}, and as many steps had a loss or a gradient that is not finite, the "
                f"last one step {step}. Look at the images in {self.path}, lower --learning_rate, or train in bf16 or fp32."
            )
        return False
