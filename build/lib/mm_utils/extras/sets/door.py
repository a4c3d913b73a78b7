"""What the embedded sets add: `--dataset_name clips` or `sounds`, and tasks to fine-tune on."""

SETS = {"clips": "mm_utils.extras.sets.events.load_clips", "sounds": "mm_utils.extras.sets.tones.load_sounds"}
"""By the name of a set, what returns its splits."""

_QUESTIONS = "mm_utils.extras.sets.questions"
TASKS = {
    "scenes:describes": f"{_QUESTIONS}.describes",
    "scenes:count": f"{_QUESTIONS}.count",
    "scenes:colour": f"{_QUESTIONS}.colour",
    "clips:describes": f"{_QUESTIONS}.describes",
    "clips:first": f"{_QUESTIONS}.first_colour",
    "sounds:describes": f"{_QUESTIONS}.describes",
    "sounds:first": f"{_QUESTIONS}.first_kind",
}
"""By set and task, what yields examples of the rows of a split: row, text, name of the class."""
