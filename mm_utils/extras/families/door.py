"""What models of others add to the core, see `mm_utils.doors`."""

TOWER_CHANGES = {
    "image_size": "mm_utils.extras.families.image_size.resize",
    "text_tower": "mm_utils.extras.families.text_tower.with_text_tower",
}
TERMS = {"sentences": "mm_utils.extras.families.sentences.Sentences"}
CALLBACKS = {"sentences": "mm_utils.extras.families.sentences.CacheSentences"}
MODEL_FORMATS = {"open_clip_config.json": "mm_utils.extras.families.open_clip.as_transformers"}
