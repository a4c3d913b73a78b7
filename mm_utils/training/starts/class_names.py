"""Read off media which of the classes that a backbone knows by name they show.

A backbone that was trained on named classes, such as ImageNet's thousand or AudioSet's 527, comes with a classifier that a dual
encoder does not use. Its answers are words, and so a second caption that nobody had to write.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForAudioClassification, AutoModelForImageClassification, PreTrainedModel
from transformers.utils import ModelOutput

from mm_utils.model.join import probe_input
from mm_utils.model.pretrained import explained, load_config

TEMPERATURE = 2.0  # of the probabilities, so that the second and the third class count too
CLASSIFIERS: dict[str, Any] = {
    "ForImageClassification": AutoModelForImageClassification,
    "ForAudioClassification": AutoModelForAudioClassification,
}


class SeenClasses:
    """The classifier of a backbone, which reads what a tower has just returned.

    Attributes:
        names: the names of the classes.
        reads_pooled: whether what is pooled of the tower's output is all that it reads.
    """

    def __init__(
        self, names: list[str], classifier: Any, tower: PreTrainedModel, pool: Callable[[ModelOutput], Tensor]
    ):
        self.names, self.classifier, self._replay = names, classifier, _Replay()
        setattr(classifier, classifier.base_model_prefix, self._replay)
        self.handle = tower.register_forward_hook(self._replay.keep)
        self.reads_pooled = self._reads_pooled(tower, pool)

    def __call__(self, pooled_BC: Tensor | None = None) -> Tensor:
        """Return the probabilities of the classes, `[B, classes]`, by the tower's last output, or by a pooled one."""
        return self._logits(pooled_BC).softmax(-1)

    def _logits(self, pooled_BC: Tensor | None) -> Tensor:
        if pooled_BC is not None:
            states = pooled_BC[:, None]  # read by those that take the first token
            self._replay.output = replace(self._replay.output, pooler_output=pooled_BC, last_hidden_state=states)
        return self.classifier(None).logits.float() / TEMPERATURE

    @torch.no_grad()
    def _reads_pooled(self, tower: PreTrainedModel, pool: Callable[[ModelOutput], Tensor]) -> bool:
        tower(**probe_input(tower, "vision"))
        expected = self()
        try:
            return torch.allclose(expected, self(pool(self._replay.output)), atol=1e-5)
        except Exception:  # what a classifier raises that asks for more depends on the family
            return False


@contextmanager
def read_classes(
    name: str | None, tower: PreTrainedModel, pool: Callable[[ModelOutput], Tensor]
) -> Iterator[SeenClasses | None]:
    """Yield the classes of a backbone; None without any that have names.

    A classifier whose backbone is of another class than the tower, as timm's are, is not read.

    Args:
        name: the folder or the Hub id that the tower was loaded from; None for that of a whole model, which has no classes.
        tower: the tower, in evaluation mode.
        pool: what a model takes of its output, `[B, C]`.
    """
    if name is None:
        yield None
        return
    title = f"--vision_model_name_or_path is {name}"
    config = load_config(title, name)
    names = [value for _, value in sorted((getattr(config, "id2label", None) or {}).items())]
    kinds = (
        kind for each in getattr(config, "architectures", None) or () for kind in CLASSIFIERS if each.endswith(kind)
    )
    kind = next(kinds, None)
    if kind is None or not names or names[0] == "LABEL_0":
        yield None
        return
    with explained(title, name):
        classifier = CLASSIFIERS[kind].from_pretrained(name, use_safetensors=True, dtype="float32").eval()
    if type(getattr(classifier, classifier.base_model_prefix, None)) is not type(tower):
        yield None
        return
    found = SeenClasses(names, classifier.to(tower.device), tower, pool)
    try:
        yield found
    finally:
        found.handle.remove()


class _Replay(nn.Module):
    """Return the last output of another backbone in place of running this one."""

    output: Any = None

    def keep(self, _: nn.Module, __: Any, output: Any) -> None:
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output
