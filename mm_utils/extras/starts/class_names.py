"""Read off images which of the classes that a vision backbone knows by name they show.

A backbone that was trained on named classes, such as ImageNet's thousand, comes with a classifier that a dual encoder does not
use. Its answers are words, and so a second caption that nobody had to write.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForImageClassification, PreTrainedModel

from mm_utils.model.pretrained import explained, load_config

TEMPERATURE = 2.0  # of the probabilities, so that the second and the third class count too
ClassReader = Callable[[Tensor], Tensor]
"""Called with images that the tower has just seen, returns the probabilities of the classes, `[B, classes]`."""


@contextmanager
def read_classes(name: str | None, tower: PreTrainedModel) -> Iterator[tuple[list[str], ClassReader | None]]:
    """Yield the names of a backbone's classes and their reader; no names and None without any.

    A classifier whose backbone is of another class than the tower, as timm's are, is not read.

    Args:
        name: the folder or the Hub id that the tower was loaded from; None for that of a whole model, which has no classes.
        tower: the tower, which is not run again.
    """
    if name is None:
        yield [], None
        return
    title = f"--vision_model_name_or_path is {name}"
    config = load_config(title, name)
    names = [value for _, value in sorted((getattr(config, "id2label", None) or {}).items())]
    is_classifier = any(
        kind.endswith("ForImageClassification") for kind in getattr(config, "architectures", None) or ()
    )
    if not is_classifier or not names or names[0] == "LABEL_0":
        yield [], None
        return
    with explained(title, name):
        classifier = AutoModelForImageClassification.from_pretrained(
            name, use_safetensors=True, dtype="float32"
        ).eval()
    if type(getattr(classifier, classifier.base_model_prefix, None)) is not type(tower):
        yield [], None
        return
    replay = _Replay()
    setattr(classifier, classifier.base_model_prefix, replay)
    classifier.to(tower.device)
    handle = tower.register_forward_hook(replay.keep)
    try:
        yield names, lambda images: (classifier(images).logits.float() / TEMPERATURE).softmax(-1)
    finally:
        handle.remove()


class _Replay(nn.Module):
    """Return the last output of another backbone in place of running this one."""

    output: Any = None

    def keep(self, _: nn.Module, __: Any, output: Any) -> None:
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output
