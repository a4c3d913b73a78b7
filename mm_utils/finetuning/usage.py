"""Code in a model card that classifies."""

from mm_utils.reports.model_card import EXAMPLES


def usage(inputs: str, name: str, medium: str) -> str:
    """Return code that runs as pasted, in any folder.

    Args:
        inputs: what the classifier reads, as in the model's config.
        name: the model's, quoted.
        medium: what it is trained on.
    """
    if medium == "image" or inputs == "text":
        return _classify_code(name, inputs)
    return _predict_code(name, medium, inputs)


def _classify_code(name: str, inputs: str) -> str:
    given = [
        *(['images=[Image.open("photo.jpg").convert("RGB")]'] if inputs != "text" else []),
        *(['text=["a text"]'] if inputs != "image" else []),
    ]
    picture = "from PIL import Image\n" if inputs != "text" else ""
    comment = {"text": "# Take your own text.", "image": "# Take your own picture."}.get(
        inputs, "# Take your own picture and text."
    )
    return f"""\
import torch
{picture}from transformers import AutoModelForSequenceClassification, AutoProcessor

folder = {name}
model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
processor = AutoProcessor.from_pretrained(folder)

{comment}
inputs = processor({", ".join(given)}, return_tensors="pt")
with torch.no_grad():
    share = model(**inputs).logits.softmax(-1)[0]
for number in share.argsort(descending=True)[:5].tolist():
    print(f"{{share[number]:.3f}}  {{model.config.id2label[number]}}")"""


def _predict_code(name: str, medium: str, inputs: str) -> str:
    media, files, _ = EXAMPLES[medium]
    has_texts = inputs != "image"
    return f"""\
from pathlib import Path

from transformers import AutoModelForSequenceClassification

folder = {name}
model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)

# Take your own {media}{", and a text for each" if has_texts else ""}.
{media} = sorted(Path("{media}").glob("{files}"))
shares = model.predict({medium}s{f', ["a text"] * len({medium}s)' if has_texts else ""})
for share in shares:
    print(f"{{share.max():.3f}}  {{model.config.id2label[share.argmax().item()]}}")"""
