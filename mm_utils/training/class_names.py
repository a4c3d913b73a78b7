"""Read off media which of the classes that a backbone knows by name they show.

A backbone that was trained on named classes, such as ImageNet's thousand or AudioSet's 527, comes with a classifier that a dual
encoder does not use. Its answers are words, and so a second caption that nobody had to write.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForAudioClassification, AutoModelForImageClassification, PreTrainedModel
from transformers.utils import ModelOutput

from mm_utils.model.join import probe_input
from mm_utils.model.pretrained import load_config

TEMPERATURE = 2.0  # of the probabilities, so that the second and the third class count too
CLASSIFIERS: dict[str, Any] = {
    "ForImageClassification": AutoModelForImageClassification,
    "ForAudioClassification": AutoModelForAudioClassification,
}
Pool = Callable[[ModelOutput], Tensor]


class SeenClasses(nn.Module):
    """The named classes of a classifier; it stands in place of the classifier's backbone and repeats what a tower returned last."""

    output: Any

    def __init__(self, names: list[str], classifier: Any, tower: PreTrainedModel, pool: Pool):
        super().__init__()
        self.names = names
        self.classify = classifier.forward
        setattr(classifier, classifier.base_model_prefix, self)
        self.handle = tower.register_forward_hook(lambda _, __, output: setattr(self, "output", output))
        with torch.no_grad():
            tower(**probe_input(tower, "vision"))
            try:  # whether what is pooled of the tower's output is all that the classifier reads
                self.reads_pooled = torch.allclose(
                    self.probabilities(), self.probabilities(pool(self.output)), atol=1e-5
                )
            except Exception:  # what a classifier raises that asks for more depends on the family
                self.reads_pooled = False

    def probabilities(self, pooled_BC: Tensor | None = None) -> Tensor:
        """Return the probabilities of the classes, `[B, classes]`, by the tower's last output, or by a pooled one."""
        if pooled_BC is not None:  # as states, it is read by those that take the first token
            self.output = replace(self.output, pooler_output=pooled_BC, last_hidden_state=pooled_BC[:, None])
        return (self.classify(None).logits.float() / TEMPERATURE).softmax(-1)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the tower's last output."""
        return self.output


def read_classes(name: str | None, tower: PreTrainedModel, pool: Pool) -> SeenClasses | None:
    """Return the classes of a backbone, whose `handle` is to be removed; None without any that have names.

    A classifier whose backbone is of another class than the tower, as timm's are, is not read; `name` is what the tower was loaded
    from, None for that of a whole model, which has no classes.
    """
    config = None if name is None else load_config(f"--vision_model_name_or_path is {name}", name)
    names = [value for _, value in sorted((getattr(config, "id2label", None) or {}).items())]
    architectures = getattr(config, "architectures", None) or ()
    # 'ViTForImageClassification' -> 'ForImageClassification'
    kind = next((kind for each in architectures for kind in CLASSIFIERS if each.endswith(kind)), None)
    # 'LABEL_0' is what transformers writes where a config names no classes
    if name is None or kind is None or not names or names[0] == "LABEL_0":
        return None
    classifier = CLASSIFIERS[kind].from_pretrained(name, use_safetensors=True, dtype="float32").eval()
    if type(getattr(classifier, classifier.base_model_prefix, None)) is not type(tower):
        return None
    return SeenClasses(names, classifier.to(tower.device), tower, pool)
